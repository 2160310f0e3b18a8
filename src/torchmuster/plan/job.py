"""What is to be trained, and one way to spread it over ranks: plain values, read and written as JSON."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchmuster.train.strategies.sharding import ShardLayout

Recompute: TypeAlias = (
    Literal["none", "full", "selective"] | int
)  # a number: every so-manieth block


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, apart from how it is spread; the names are those of the settings."""

    build: str | None = None  # module:function that returns the model
    model_name_or_path: str | None = None  # or a model of transformers: folder, or name on the hub
    torch_dtype: str | None = None
    attention: str = "sdpa"
    loss: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    dataset: str | None = None  # module:function; its first sample shows what a batch looks like
    sequence_length: int | None = None  # of rows of text, where there is no dataset
    packed: bool = False  # such a row holds several documents, which do not see each other
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip_norm: float | None = None
    folder: str = "."  # where modules are imported from, and relative paths begin


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train: how the model is spread, and how large a rank's portions are."""

    strategy: Literal["single", "ddp", "fsdp"]
    layout: (
        ShardLayout  # single: 1 x 1; ddp: ranks x 1; fsdp full: 1 x ranks; hybrid: copies x shards
    )
    reshard: bool = True  # fsdp: blocks are given back between forward and backward (full_shard)
    cpu_offload: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    recompute: Recompute = "none"
    micro_batch_size: int = 1
    accumulation: int = 1

    @property
    def global_batch_size(self) -> int:
        """Samples of a whole step."""
        return self.layout.ranks * self.micro_batch_size * self.accumulation
