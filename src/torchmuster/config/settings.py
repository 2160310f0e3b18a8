"""Every setting there is: its name, type, limits, default and one line of help.

This file is the single source for the YAML file, the environment variables, the flags, the JSON
Schema and the reference page. A part of the product that needs a setting adds it here.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

GpuId: TypeAlias = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How many devices take part in the run, which ones, and how the work is split."""

    enabled: Annotated[
        bool, Meta(description="Run one process per device; false means one process on one device.")
    ] = True
    num_gpus: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="How many GPUs to use; all visible ones if left out."),
    ] = None
    gpu_ids: Annotated[
        Annotated[tuple[GpuId, ...], Meta(min_length=1)] | None,
        Meta(description="Which GPUs: nvidia-smi numbers, UUIDs or unique beginnings of UUIDs."),
    ] = None
    strategy: Annotated[
        Literal["auto", "ddp", "fsdp"],
        Meta(description="ddp copies the model to each GPU, fsdp shards it; auto decides."),
    ] = "auto"
    fsdp_sharding_strategy: Annotated[
        Literal["full_shard", "shard_grad_op", "hybrid_shard"],
        Meta(description="What fsdp shards; only used with strategy fsdp."),
    ] = "full_shard"
    fsdp_cpu_offload: Annotated[
        bool, Meta(description="Keep fsdp's shards in host memory: slower, fits larger models.")
    ] = False
    master_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="TCP port on which the processes meet; a free one if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, in which precision, placed where."""

    model_name_or_path: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="A local folder or the name of a model on the Hugging Face hub."),
    ] = None
    device_map: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="Where the model is placed.")
    ] = "auto"
    torch_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Number type of the weights; auto keeps the model's own."),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """On which machines the run is started, and what happens when it fails."""

    hosts: Annotated[
        Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] | None,
        Meta(description="Machines by the names ssh knows, first one first: a, b:4 (4 ranks), c."),
    ] = None
    max_restarts: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="How often the whole run is started again after a failure."),
    ] = 0
    remote_python: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Python on the other machines; the same path as here if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    experiment_name: Annotated[
        str, Meta(min_length=1, description="Names the run folder and the tracker's run.")
    ] = "experiment"
    distributed: Distributed = field(default_factory=Distributed)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
