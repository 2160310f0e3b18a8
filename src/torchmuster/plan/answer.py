"""What a plan answers: ways to train with their figures, the chosen one, and what would change it."""

from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.finding import Finding
from torchmuster.plan.asked import Asked
from torchmuster.plan.job import Candidate
from torchmuster.plan.memory.forecast import Memory
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

    asked: Asked
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


def name_of(candidate: Candidate) -> str:
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


def in_short(candidate: Candidate) -> str:
    """Name a way with what it computes again."""
    return f"{name_of(candidate)} with recompute {recompute_of(candidate)}"
