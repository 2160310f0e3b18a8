"""The training job, and one way to spread it over ranks: plain values, stored as JSON."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchmuster.train.strategies.sharding import ShardLayout

Recompute: TypeAlias = Literal["none", "full", "selective"] | int  # an integer N: every N-th block


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, without how it is spread; the names match the settings."""

    build: str | None = None  # module:function that returns the model
    model_name_or_path: str | None = None  # or a transformers model: folder, or name on the hub
    torch_dtype: str | None = None
    loss: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    lora_dropout: float = 0.0
    lora_modules_to_save: tuple[str, ...] | None = None
    load_in_4bit: bool = False  # the frozen linear layers, with bitsandbytes
    dataset: str | None = None  # module:function; its first sample gives the shape of a batch
    images: str | None = None  # or a folder of images; its first one gives the shape
    sequence_length: int | None = None  # of rows of text, if there is no dataset
    packed: bool = False  # a row holds several documents, which do not attend to each other
    optimizer: str = "adamw"  # a name, or module:function
    clip_norm: float | None = None
    folder: str = "."  # modules are imported from here; relative paths start here


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration to train: how the model is spread, and the micro-batch of a rank."""

    strategy: Literal["single", "ddp", "fsdp"]
    layout: (
        ShardLayout  # single: 1 x 1; ddp: ranks x 1; fsdp full: 1 x ranks; hybrid: copies x shards
    )
    reshard: bool = True  # fsdp: blocks are freed between forward and backward (full_shard)
    cpu_offload: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    recompute: Recompute = "none"
    micro_batch_size: int = 1
    accumulation: int = 1

    @property
    def global_batch_size(self) -> int:
        """The number of samples in a whole step."""
        return self.layout.ranks * self.micro_batch_size * self.accumulation
