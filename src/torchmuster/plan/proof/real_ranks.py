"""Run real training steps of a candidate on fresh ranks of this machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from torchmuster.errors import MusterError
from torchmuster.launch import local_ranks
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT
from torchmuster.plan.job import Candidate, Work

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


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured; a rank that ran out of memory has measured nothing."""

    rank: int
    ran_out: str = ""  # the message, if memory ran out
    peaks_bytes: tuple[int, ...] = ()  # of tensors on the device, in each of the first steps
    reserved_bytes: int | None = None  # peak of an accelerator's allocator; None on the CPU
    limit_bytes: int | None = None  # of an accelerator
    step_s: tuple[float, ...] = ()  # of the steps after them, without memory tracking

    @property
    def peak_bytes(self) -> int:
        """The peak of a step in the steady state.

        The lower of two steps: gloo's threads may hold their send buffers a moment too long.
        """
        return min(self.peaks_bytes[-2:])

    @property
    def used_bytes(self) -> int:
        """The most memory that was in use, of ``limit_bytes``."""
        return self.reserved_bytes or max(self.peaks_bytes, default=0)


def ran_out(ranks: Sequence[RankSteps]) -> bool:
    """Return whether memory ran out: of a rank, or of the host, whose kernel then killed one."""
    return not ranks or any(rank.ran_out for rank in ranks)


def run_real_steps(
    work: Work,
    candidate: Candidate,
    *,
    device: Literal["cpu", "gpu"] = "cpu",
    steps: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> list[RankSteps]:
    """Run real steps on this machine: memory is tracked in the first ones, ``steps`` more are timed.

    If memory runs out, only the ranks that report it are returned: none if the kernel killed one.
    Any other failure raises an error with its cause.
    """
    request = RealSteps(
        work=work,
        candidate=candidate,
        device="cpu" if device == "cpu" else "auto",
        timed=steps,
    )
    output = local_ranks.run_local_ranks(
        PROGRAM,
        msgspec.json.encode(request).decode(),
        ranks=candidate.layout.ranks,
        device=device,
        folder=str(Path(work.folder).absolute()),
        name="plan-steps",
        doing=f"real steps with micro-batches of {candidate.micro_batch_size}",
        say=say,
    )
    measured = []
    for _, text in sorted(output.texts.items()):
        measured.append(msgspec.json.decode(text, type=RankSteps))
    if ran_out(measured) and measured:
        return [rank for rank in measured if rank.ran_out]
    trouble = output.trouble
    if trouble is None and len(measured) == candidate.layout.ranks:
        return measured
    if trouble is not None and KERNEL_KILLED_IT in f"{trouble.what}{trouble.why}{trouble.evidence}":
        return []
    why = f"{len(measured)} of {candidate.layout.ranks} ranks reported a result"
    fix = "try again; the plan itself is not affected"
    if trouble is not None:
        why, fix = local_ranks.describe_failure(trouble), trouble.fix
    raise MusterError("the real steps failed", why=why, fix=fix)
