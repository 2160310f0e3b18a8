"""What a plan answers: ways to train with their figures, the chosen one, and what would change it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.devices.request import GpuId
from torchmuster.finding import Finding
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.timing.forecast import StepTime


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One way to train, and what it would take."""

    candidate: Candidate
    memory: Memory
    time: StepTime | None  # None: the model could not be traced
    spare_bytes: int  # of a card, above the high end of the band; negative: so much is missing
    host_spare_bytes: int | None  # of a machine; None: its memory is not known
    samples_per_s: float | None

    @property
    def could_fit(self) -> bool:
        """Whether it fits if the low end of the band comes true."""
        band_bytes = self.memory.high_bytes - self.memory.low_bytes
        return self.spare_bytes + band_bytes >= 0

    @property
    def fits(self) -> bool:
        """Whether it fits even if the high end of the band comes true."""
        return self.spare_bytes >= 0 and (self.host_spare_bytes or 0) >= 0

    @property
    def is_tight(self) -> bool:
        """Whether it fits only if the high end of the band does not come true."""
        band_bytes = self.memory.high_bytes - self.memory.total_bytes
        return not self.fits and self.spare_bytes + band_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """Ways that were not looked at closely, and why: a bound said enough."""

    name: str
    why: str
    needs_bytes: int | None = None  # of a card, at the least; where that is what was in the way
    of_states: bool = False  # these are weights, gradients and moments alone


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The chosen way, the others beside it, and what would change the choice."""

    asked: PlanRequest
    chosen: Decision[Forecast]
    runner_up: Decision[Forecast] | None  # its reason says why it was not taken
    table: tuple[Forecast, ...]  # the best of each way, the fastest that fits first
    passed_over: tuple[PassedOver, ...]
    would_change: tuple[str, ...]
    findings: tuple[Finding, ...]
    parameter_count: int | None
    tokens_per_sample: int | None
    sources: tuple[tuple[str, str], ...]  # of each kind of figure: memory, time, card, links
    took_s: float = 0.0


def candidate_name(candidate: Candidate) -> str:
    """Name a way to spread a model: ``ddp``, ``fsdp``, ``shard_grad_op``, ``hybrid 4 x 8``."""
    layout = candidate.layout
    name: str = candidate.strategy
    if candidate.strategy == "fsdp" and not candidate.reshard:
        name = "shard_grad_op"
    elif candidate.strategy == "fsdp" and layout.copies > 1:
        name = f"hybrid {layout.copies} x {layout.shards}"
    return f"{name} + offload" if candidate.cpu_offload else name


def recompute_of(candidate: Candidate) -> str:
    """Name how activations are kept, for people."""
    how = candidate.recompute
    return f"every {how}." if isinstance(how, int) else how


def short_name(candidate: Candidate) -> str:
    """Name a way with what it computes again."""
    return f"{candidate_name(candidate)} with recompute {recompute_of(candidate)}"


def as_settings(
    candidate: Candidate, asked: PlanRequest, *, gpu_ids: Sequence[GpuId] | None = None
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
    asked: PlanRequest,
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
