"""Run real training steps of a candidate on fresh ranks of this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from torchmuster.errors import MusterError
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof import fresh_ranks

PROGRAM = "torchmuster.plan.probes.real_steps"
# The optimizer's states exist after the first step, and ddp rebuilds its buckets in the second.
FOLLOWED = 4


@dataclass(frozen=True, kw_only=True)
class RealSteps:
    """The request to each rank: the work, the candidate, and how many steps to time."""

    work: Work
    candidate: Candidate
    device: Literal["auto", "cpu"]
    timed: int
    blocks: int | None = None  # number of the model's repeated layers to use; None: all
    limits_bytes: tuple[int, ...] | None = None  # of tensors, for each rank, on the CPU


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured; a rank that ran out of memory has measured nothing."""

    rank: int
    device: str
    ran_out: str = ""  # the message, if memory ran out
    peaks_bytes: tuple[int, ...] = ()  # of tensors on the device, in each of the first steps
    reserved_bytes: int | None = None  # peak of an accelerator's allocator; None on the CPU
    limit_bytes: int | None = None  # of the device, or of this rank's share of a CPU's memory
    step_s: tuple[float, ...] = ()  # of the steps after them, without memory tracking
    loss: float | None = None  # mean loss of one more micro-batch

    @property
    def peak_bytes(self) -> int:
        """The peak of a step in the steady state.

        The lower of two steps: gloo's threads may hold their send buffers a moment too long.
        """
        return min(self.peaks_bytes[-2:])

    @property
    def used_bytes(self) -> int:
        """The most memory that was in use, of ``limit_bytes``."""
        return self.reserved_bytes or max(self.peaks_bytes)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the ranks measured; ``ran_out`` if the memory of a rank or of the host was too small."""

    ranks: tuple[RankSteps, ...]
    ran_out: bool = False


def run_real_steps(
    work: Work,
    candidate: Candidate,
    *,
    device: Literal["cpu", "gpu"] = "cpu",
    steps: int = 5,
    blocks: int | None = None,
    limits_bytes: tuple[int, ...] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run real steps on this machine: memory is tracked in the first ones, ``steps`` more are timed.

    A failure that is not a lack of memory raises an error with its cause.
    """
    request = RealSteps(
        work=work,
        candidate=candidate,
        device="cpu" if device == "cpu" else "auto",
        timed=steps,
        blocks=blocks,
        limits_bytes=limits_bytes,
    )
    ranks = candidate.layout.ranks
    output = fresh_ranks.run_fresh_ranks(
        PROGRAM,
        msgspec.json.encode(request).decode(),
        ranks=ranks,
        device=device,
        folder=str(Path(work.folder).absolute()),
        name="plan-steps",
        doing=f"real steps with micro-batches of {candidate.micro_batch_size}",
        say=say,
    )
    measured = [
        msgspec.json.decode(output.texts[rank], type=RankSteps) for rank in sorted(output.texts)
    ]
    trouble = output.trouble
    out = tuple(rank for rank in measured if rank.ran_out)
    if out:
        return Outcome(ranks=out, ran_out=True)
    if trouble is not None:
        text = f"{trouble.what}\n{trouble.why}\n{trouble.evidence}"
        if KERNEL_KILLED_IT in text:
            return Outcome(ranks=(), ran_out=True)
        raise MusterError(
            "the real steps failed", why=fresh_ranks.describe_failure(trouble), fix=trouble.fix
        )
    if len(measured) < ranks:
        raise MusterError(
            "the real steps failed",
            why=f"{len(measured)} of {ranks} ranks reported a result",
            fix="try again; the plan itself is not affected",
        )
    return Outcome(ranks=tuple(measured))
