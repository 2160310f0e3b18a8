"""The training job, and one way to spread it over ranks: plain values, stored as JSON."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import plural

Recompute: TypeAlias = Literal["none", "full", "selective"] | int  # an integer N: every N-th block
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, without how it is spread; the names match the settings."""

    build: str | None = None  # module:function that returns the model
    model_name_or_path: str | None = None  # or a transformers model: folder, or name on the hub
    torch_dtype: str | None = None
    loss: str | None = None
    lora: dict[str, Any] | None = field(default=None, hash=False)  # options of peft.LoraConfig
    load_in_4bit: bool = False  # the frozen linear layers, with bitsandbytes
    dataset: str | None = None  # module:function; its first sample gives the shape of a batch
    images: str | None = None  # or a folder of images; its first one gives the shape
    sequence_length: int | None = None  # of rows of text, if there is no dataset
    packed: bool = False  # a row holds several documents, which do not attend to each other
    optimizer: str = "adamw"  # a name, or module:function
    optimizer_options: dict[str, Any] | None = field(default=None, hash=False)
    clip_norm: float | None = None
    folder: str = "."  # modules are imported from here; relative paths start here


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration to train: how the model is spread, and the micro-batch of a rank."""

    strategy: Literal["single", "ddp", "fsdp"]
    # single: 1 x 1; ddp: ranks x 1; fsdp full: 1 x ranks; hybrid: copies x shards
    layout: ShardLayout
    reshard: bool = True  # fsdp: blocks are freed between forward and backward (full_shard)
    cpu_offload: bool = False
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    micro_batch_size: int = 1
    accumulation: int = 1

    @property
    def global_batch_size(self) -> int:
        """The number of samples in a whole step."""
        return self.layout.ranks * self.micro_batch_size * self.accumulation

    @property
    def name(self) -> str:
        """The name of the strategy: ``ddp``, ``fsdp``, ``shard_grad_op``, ``hybrid 4 x 8``."""
        name: str = self.strategy
        if self.strategy == "fsdp" and not self.reshard:
            name = "shard_grad_op"
        elif self.strategy == "fsdp" and self.layout.copies > 1:
            name = f"hybrid {self.layout.copies} x {self.layout.shards}"
        return f"{name} + offload" if self.cpu_offload else name

    @property
    def batch_text(self) -> str:
        """The micro-batch and how many of them a step has: ``2 x 4``."""
        size = str(self.micro_batch_size)
        return size if self.accumulation == 1 else f"{size} x {self.accumulation}"

    @property
    def recompute_text(self) -> str:
        """What is recomputed: ``none``, ``selective``, ``full``, or ``every 2.``."""
        mode = self.recompute
        return f"every {mode}." if isinstance(mode, int) else mode

    def describe(self, noun: str) -> str:
        """Describe the candidate: ``fsdp over 8 GPUs, micro-batch 2 x 4, bf16, recompute full``."""
        parts = [self.name, f"micro-batch {self.batch_text}", self.precision]
        if self.layout.ranks > 1:
            parts[0] += f" over {plural(self.layout.ranks, noun)}"
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute_text}")
        return ", ".join(parts)
