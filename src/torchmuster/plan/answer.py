"""The result of a plan: forecast candidates, the chosen one, and what would change the choice."""

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
    """One candidate with its memory and time."""

    candidate: Candidate
    memory: Memory
    time: StepTime | None  # None: the model could not be traced
    spare_bytes: int  # of a GPU, above the high end of the band; negative: this much is missing
    host_spare_bytes: int | None  # of a machine; None: its memory is unknown
    samples_per_s: float | None

    @property
    def could_fit(self) -> bool:
        """Whether it fits at the low end of the band."""
        band_bytes = self.memory.high_bytes - self.memory.low_bytes
        return self.spare_bytes + band_bytes >= 0

    @property
    def fits(self) -> bool:
        """Whether it fits even at the high end of the band."""
        return self.spare_bytes >= 0 and (self.host_spare_bytes or 0) >= 0

    @property
    def is_tight(self) -> bool:
        """Whether it fits at the low end of the band, but not at the high end."""
        band_bytes = self.memory.high_bytes - self.memory.total_bytes
        return not self.fits and self.spare_bytes + band_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A candidate that was skipped because of a bound, and why."""

    name: str
    why: str
    needs_bytes: int | None = None  # least memory of a GPU, if memory was the reason
    of_states: bool = False  # these are weights, gradients and moments alone


@dataclass(frozen=True, kw_only=True)
class Offer:
    """LoRA or QLoRA: it needs less memory, and trains less than full training."""

    name: str
    rank: int
    forecast: Forecast  # of the preferred candidate; of the nearest one if none fits
    settings: Mapping[str, str]  # to add to the request, by their paths
    trained_count: int | None
    parameter_count: int | None
    asked: PlanRequest

    @property
    def flags(self) -> str:
        """The settings as flags of ``muster plan`` and ``muster train``."""
        return " ".join(f"--set {path}={value}" for path, value in self.settings.items())


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The chosen candidate, the others, and what would change the choice."""

    asked: PlanRequest
    chosen: Decision[Forecast]
    runner_up: Decision[Forecast] | None  # its reason says why it was not chosen
    table: tuple[Forecast, ...]  # the best of each candidate, the fastest that fits first
    passed_over: tuple[PassedOver, ...]
    would_change: tuple[str, ...]
    offers: tuple[Offer, ...]  # where full training fits only with CPU offload
    findings: tuple[Finding, ...]
    parameter_count: int | None
    tokens_per_sample: int | None
    sources: tuple[tuple[str, str], ...]  # of each kind of figure: memory, time, GPU, links
    took_s: float = 0.0


def candidate_name(candidate: Candidate) -> str:
    """Return the name of a strategy: ``ddp``, ``fsdp``, ``shard_grad_op``, ``hybrid 4 x 8``."""
    layout = candidate.layout
    name: str = candidate.strategy
    if candidate.strategy == "fsdp" and not candidate.reshard:
        name = "shard_grad_op"
    elif candidate.strategy == "fsdp" and layout.copies > 1:
        name = f"hybrid {layout.copies} x {layout.shards}"
    return f"{name} + offload" if candidate.cpu_offload else name


def recompute_of(candidate: Candidate) -> str:
    """Return how activations are kept, as shown to users."""
    how = candidate.recompute
    return f"every {how}." if isinstance(how, int) else how


def short_name(candidate: Candidate) -> str:
    """Return the name of a strategy with its recompute mode."""
    return f"{candidate_name(candidate)} with recompute {recompute_of(candidate)}"


def as_settings(
    candidate: Candidate, asked: PlanRequest, *, gpu_ids: Sequence[GpuId] | None = None
) -> dict[str, str]:
    """Return the settings that train with this candidate, by their paths, as text.

    ``gpu_ids`` are the requested GPUs; only as many as the candidate uses are set.
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
    """Return the train command; ``given`` are the plan's flags in addition to the file."""
    words = ["muster", "train"]
    if config is not None:
        words += ["--config", config]
    if asked.hardware.card.kind == "cpu":
        words += ["--device", "cpu", "--ranks", str(candidate.layout.ranks)]
    for path, value in {**given, **settings}.items():
        words += ["--set", f"{path}={value}"]
    return shlex.join(words)
