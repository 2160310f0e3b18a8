"""The result of a plan: forecast candidates, the chosen one, and the settings that train with it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.devices.request import GpuId
from torchmuster.finding import Finding
from torchmuster.plan.estimate import Memory, StepTime
from torchmuster.plan.job import Candidate
from torchmuster.plan.request import PlanRequest
from torchmuster.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One candidate with its memory and time."""

    candidate: Candidate
    memory: Memory
    time: StepTime | None  # None: no rates are known for this device
    spare_bytes: int  # of a GPU, above the high end of the band; negative: this much is missing
    host_spare_bytes: int  # of a machine; 0 if its memory is unknown

    @property
    def fits(self) -> bool:
        """Whether it fits even at the high end of the band."""
        return self.spare_bytes >= 0 and self.host_spare_bytes >= 0

    @property
    def missing_bytes(self) -> int:
        """What a GPU or its host lacks at the expected use; 0 or less: it probably fits."""
        band_bytes = self.memory.high_bytes - self.memory.total_bytes
        return max(-self.spare_bytes - band_bytes, -self.host_spare_bytes)

    @property
    def probably_fits(self) -> bool:
        """Whether it fits at the expected use."""
        return self.missing_bytes <= 0

    @property
    def samples_per_s(self) -> float:
        """The speed of all ranks; 0 if it is unknown."""
        return 0.0 if self.time is None else self.time.samples_per_s

    @property
    def band_text(self) -> str:
        """The expected memory with its band."""
        memory = self.memory
        return (
            f"{format_bytes(memory.total_bytes)} (band {format_bytes(memory.low_bytes)} to "
            f"{format_bytes(memory.high_bytes)})"
        )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """LoRA or QLoRA: it needs less memory, and trains less than full training."""

    name: str
    forecast: Forecast  # the preferred one that fits, else the nearest
    settings: Mapping[str, str]  # to add to the request, by their paths
    trained_count: int

    @property
    def flags(self) -> str:
        """The settings as flags of ``muster plan`` and ``muster train``."""
        pairs = [f"{path}={value}" for path, value in self.settings.items()]
        return " ".join(f"--set {shlex.quote(pair)}" for pair in pairs)

    def describe(self, noun: str) -> str:
        """Describe the offer in one line."""
        missing = ""
        if not self.forecast.probably_fits:
            missing = f", {format_bytes(self.forecast.missing_bytes)} too much"
        return (
            f"{self.name} (trains {self.trained_count / 1e6:,.1f} M parameters): "
            f"{self.forecast.candidate.describe(noun)}: {self.forecast.band_text}{missing}"
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The chosen candidate and the others."""

    request: PlanRequest
    chosen: Decision[Forecast]
    table: tuple[Forecast, ...]  # the best micro-batch of each candidate, in order of preference
    skipped: Mapping[str, str]  # why candidates were not traced, by name
    offers: tuple[Offer, ...]  # where full training fits only with CPU offload
    findings: tuple[Finding, ...]
    parameter_count: int  # of the whole model


def as_settings(
    candidate: Candidate, request: PlanRequest, *, gpu_ids: Sequence[GpuId] | None = None
) -> dict[str, str]:
    """Return the settings that train with this candidate, by their paths, as text.

    ``gpu_ids`` are the requested GPUs; only as many as the candidate uses are set.
    """
    chosen: dict[str, str] = {}
    layout, here = candidate.layout, request.hardware.cards_per_machine
    if candidate.strategy != "single":
        chosen["distributed.strategy"] = candidate.strategy
    if candidate.strategy == "fsdp":
        sharding = "full_shard" if candidate.reshard else "shard_grad_op"
        if layout.copies > 1:
            sharding = "hybrid_shard"
        chosen["distributed.fsdp_sharding_strategy"] = sharding
    if candidate.cpu_offload:
        chosen["distributed.fsdp_cpu_offload"] = "true"
    if request.hardware.card.kind != "cpu":
        on_machine = min(layout.ranks, here)
        chosen["distributed.num_gpus"] = str(on_machine)
        if gpu_ids is not None:
            chosen["distributed.gpu_ids"] = ",".join(map(str, gpu_ids[:on_machine]))
    chosen["train.precision"] = candidate.precision
    chosen["train.micro_batch_size"] = str(candidate.micro_batch_size)
    whole = request.global_batch_size or candidate.global_batch_size
    chosen["train.global_batch_size"] = str(whole)
    chosen["train.activation_checkpointing"] = str(candidate.recompute)
    return chosen


def line_to_paste(
    settings: Mapping[str, str],
    flags: Mapping[str, str],
    candidate: Candidate,
    request: PlanRequest,
    *,
    config: str | None,
) -> str:
    """Return the train command; ``flags`` are the plan's own, in addition to the file."""
    command = ["muster", "train"]
    if config is not None:
        command += ["--config", config]
    if request.hardware.card.kind == "cpu":
        command += ["--device", "cpu", "--ranks", str(candidate.layout.ranks)]
    for path, value in {**flags, **settings}.items():
        command += ["--set", f"{path}={value}"]
    return shlex.join(command)
