"""Find the largest micro-batch of a plan with real steps, each size on fresh ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.finding import Finding, Status
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof.real_ranks import RankSteps, ran_out, run_real_steps
from torchmuster.units import format_bytes

_LARGEST_SIZE = 2**20  # where nothing limits a micro-batch


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch size that was tried, and what its ranks measured."""

    micro_batch_size: int
    ranks: Sequence[RankSteps]

    @property
    def fits(self) -> bool:
        """Whether it fits on every rank."""
        return not ran_out(self.ranks)

    def __str__(self) -> str:
        size = f"micro-batch {self.micro_batch_size}"
        if not self.ranks:
            return f"{size}: the host ran out of memory, and the kernel killed a rank"
        tightest = max(self.ranks, key=lambda rank: rank.used_bytes - (rank.limit_bytes or 0))
        limit = ""
        if tightest.limit_bytes is not None:
            limit = f" of {format_bytes(tightest.limit_bytes)}"
        if not self.fits:
            numbers = ", ".join(str(rank.rank) for rank in self.ranks)
            return f"{size}: out of memory{limit} on rank {numbers}"
        used = format_bytes(tightest.used_bytes)
        return f"{size}: fits; rank {tightest.rank} uses {used}{limit}"


def find_batch_size(
    work: Work,
    candidate: Candidate,
    *,
    device: Literal["cpu", "gpu"] = "gpu",
    samples: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[int | None, list[Trial]]:
    """Find the largest micro-batch of a candidate on this machine, beginning with its own.

    ``samples`` is the number of samples of a rank in a step, if it is fixed.
    """

    def try_size(size: int) -> Trial:
        sized = with_size(candidate, size, samples=samples)
        ranks = run_real_steps(work, sized, device=device, steps=0, say=say)
        trial = Trial(micro_batch_size=size, ranks=ranks)
        say(str(trial))
        return trial

    return largest_batch(try_size, start=candidate.micro_batch_size, most=samples)


def largest_batch(
    try_size: Callable[[int], Trial], *, start: int, most: int | None
) -> tuple[int | None, list[Trial]]:
    """Return the largest micro-batch that fits (None: not even one sample), and the trials.

    Tries ``start``, the plan's size, powers of two and ``most``, upward or downward from ``start``.
    If the plan is right, two trials are enough: its size, and the next one.
    """
    last = most or _LARGEST_SIZE
    start = min(start, last)
    sizes = {last}
    for power in range(last.bit_length()):
        sizes.add(2**power)
    trials = [try_size(start)]
    upward = trials[0].fits
    best = start if upward else None
    further = sorted(size for size in sizes if size > start)
    if not upward:
        further = sorted((size for size in sizes if size < start), reverse=True)
    for size in further:
        trials.append(try_size(size))
        if trials[-1].fits:
            best = size
        if trials[-1].fits is not upward:
            break
    return best, trials


def with_size(candidate: Candidate, size: int, *, samples: int | None) -> Candidate:
    """Return the candidate with another micro-batch, and accumulation to match its samples."""
    accumulation = candidate.accumulation if samples is None else math.ceil(samples / size)
    return replace(candidate, micro_batch_size=size, accumulation=accumulation)


def batch_size_finding(
    size: int | None, trials: Sequence[Trial], candidate: Candidate, *, samples: int | None
) -> Finding:
    """Return the finding about trials: the largest micro-batch, and the settings that use it."""
    evidence = "\n".join(map(str, trials))
    if size is None:
        return Finding(
            name="batch-size",
            status=Status.FAILURE,
            what="not even a micro-batch of 1 fits",
            fix="use more GPUs, recomputation, or shorter samples",
            evidence=evidence,
        )
    fix = f"--set train.micro_batch_size={size}"
    if samples is None:
        whole = with_size(candidate, size, samples=None).global_batch_size
        fix += f" --set train.global_batch_size={whole}"
    return Finding(
        name="batch-size",
        status=Status.OK,
        what=f"the largest micro-batch that fits is {size}; the plan chose "
        f"{candidate.micro_batch_size}",
        fix=fix,
        evidence=evidence,
    )
