"""A way to train as settings and flags of ``muster train``."""

import shlex
from collections.abc import Mapping, Sequence

from torchmuster.devices.request import GpuId
from torchmuster.plan.asked import Asked
from torchmuster.plan.hardware.model import Hardware
from torchmuster.plan.job import Candidate


def as_settings(
    candidate: Candidate, asked: Asked, *, gpu_ids: Sequence[GpuId] | None = None
) -> dict[str, str]:
    """Return the settings that make a training go this way, by their paths, as text.

    ``gpu_ids`` are the GPUs that were asked for: as many of them as the way takes.
    """
    chosen: dict[str, str] = {}
    if candidate.strategy != "single":
        chosen["distributed.strategy"] = candidate.strategy
    if candidate.strategy == "fsdp":
        chosen["distributed.fsdp_sharding_strategy"] = _sharding(candidate)
        if candidate.layout.copies > 1 and candidate.layout.shards != _per_machine(asked.hardware):
            chosen["distributed.fsdp_shard_size"] = str(candidate.layout.shards)
    if candidate.cpu_offload:
        chosen["distributed.fsdp_cpu_offload"] = "true"
    if asked.hardware.card.kind != "cpu":
        on_machine = min(candidate.layout.ranks, asked.hardware.cards_per_machine)
        chosen["distributed.num_gpus"] = str(on_machine)
        if gpu_ids is not None:
            chosen["distributed.gpu_ids"] = ",".join(map(str, gpu_ids[:on_machine]))
    chosen["train.precision"] = candidate.precision
    chosen["train.micro_batch_size"] = str(candidate.micro_batch_size)
    whole = asked.global_batch_size or candidate.global_batch_size
    chosen["train.global_batch_size"] = str(whole)
    chosen["train.activation_checkpointing"] = str(candidate.recompute)
    return chosen


def _sharding(candidate: Candidate) -> str:
    if candidate.layout.copies > 1:
        return "hybrid_shard"
    return "full_shard" if candidate.reshard else "shard_grad_op"


def _per_machine(hardware: Hardware) -> int:
    return hardware.cards_per_machine


def line_to_paste(
    settings: Mapping[str, str],
    given: Mapping[str, str],
    candidate: Candidate,
    asked: Asked,
    *,
    config: str | None,
) -> str:
    """Return the command that trains so; ``given`` is what flags of the plan said beside the file."""
    words = ["muster", "train"]
    if config is not None:
        words += ["--config", config]
    if asked.hardware.card.kind == "cpu":
        words += ["--device", "cpu", "--ranks", str(candidate.layout.ranks)]
    for path, value in {**given, **settings}.items():
        words += ["--set", f"{path}={value}"]
    return shlex.join(words)
