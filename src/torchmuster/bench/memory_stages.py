"""What fills memory at each stage of a training step: the question to a rank, and its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.bench.recomputing import Way
from torchmuster.plan.job import Candidate, Work

PROGRAM = "torchmuster.bench.probes.memory"
# What memory is for, in the order in which it comes to be; the last is what is left beside the others.
PARTS = ("parameters", "gradients", "optimiser states", "activations and others")


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What a rank is told to do."""

    work: Work
    candidate: Candidate  # in one process; its precision is replaced by what is asked for
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu"]
    rounds: int  # of timed steps; each has one step of each way


@dataclass(frozen=True, kw_only=True)
class StageTaken:
    """What tensors took in one stage of a step."""

    name: str  # model built, forward, loss, backward, optimiser step
    step: int  # 1, 2; 0 before the first
    micro_batch: int  # 1, 2; 0 outside of them
    before_bytes: int
    peak_bytes: int  # at most, within it
    after_bytes: int
    parts: Mapping[str, int]  # what is there after it, by PARTS

    @property
    def title(self) -> str:
        """The stage as people see it."""
        micro = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        return f"step {self.step}: {self.name}{micro}" if self.step else self.name


@dataclass(frozen=True, kw_only=True)
class OfPrecision:
    """The stages of the first two steps in one precision; none if memory ran out."""

    precision: str
    stages: tuple[StageTaken, ...]

    @property
    def highest(self) -> StageTaken | None:
        """The stage with the most memory in the second step, which is what all later ones are like."""
        second = [one for one in self.stages if one.step == 2]
        return max(second, key=lambda one: one.peak_bytes, default=None)


@dataclass(frozen=True, kw_only=True)
class MemoryAnswer:
    """What a rank saw."""

    rank: int
    device: str
    limit_bytes: int | None  # what the device has, or this process may take
    precision: Literal["fp32", "bf16", "fp16"]  # that the ways were tried in
    precision_reason: str
    parameter_count: int
    blocks: int  # repeated layers of the model
    stages: tuple[OfPrecision, ...]  # the precision of the ways first
    ways: tuple[Way, ...]  # what saves most first


def measure(
    request: MemoryRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> MemoryAnswer:
    """Follow and time a few real steps in a process of its own."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        MemoryAnswer,
        device=device,
        folder=request.work.folder,
        doing="measuring memory",
        say=say,
    )
    return answer
