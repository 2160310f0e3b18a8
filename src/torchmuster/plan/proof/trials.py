"""Find the largest micro-batch of a plan with real steps, each size on fresh ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.devices.for_model import USABLE_SHARE
from torchmuster.devices.readers import cpu
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.plan.device_terms import outside_allocator
from torchmuster.plan.hardware.catalogue import Hardware
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
        tightest = self.ranks[0]
        if self.fits:
            tightest = min(self.ranks, key=lambda rank: (rank.limit_bytes or 0) - rank.used_bytes)
        limit = ""
        if tightest.limit_bytes is not None:
            limit = f" of {format_bytes(tightest.limit_bytes)}"
        if not self.fits:
            numbers = ", ".join(str(rank.rank) for rank in self.ranks)
            return f"{size}: out of memory{limit} on rank {numbers}"
        used = format_bytes(tightest.used_bytes)
        return f"{size}: fits; rank {tightest.rank} uses {used}{limit}"


def largest_batch(
    try_size: Callable[[int], Trial], *, start: int, most: int | None
) -> tuple[int | None, list[Trial]]:
    """Return the largest micro-batch that fits (None: not even one sample), and the trials.

    Tries ``start``, the plan's size, powers of two and ``most``, upward or downward from ``start``.
    If the plan is right, two trials are enough: its size, and the next one.
    """
    last = most or _LARGEST_SIZE
    start = min(start, last)
    sizes = {start, last}
    for power in range(last.bit_length()):
        sizes.add(2**power)
    trials = [try_size(start)]
    best = start if trials[0].fits else None
    if best is None:
        for size in sorted((size for size in sizes if size < start), reverse=True):
            trials.append(try_size(size))
            if trials[-1].fits:
                return size, trials
        return None, trials
    for size in sorted(size for size in sizes if size > start):
        trials.append(try_size(size))
        if not trials[-1].fits:
            break
        best = size
    return best, trials


def with_size(candidate: Candidate, size: int, *, samples: int | None) -> Candidate:
    """Return the candidate with another micro-batch, and accumulation to match its samples."""
    accumulation = candidate.accumulation if samples is None else math.ceil(samples / size)
    return replace(candidate, micro_batch_size=size, accumulation=accumulation)


def limit_on_cpu(candidate: Candidate, hardware: Hardware, *, free_bytes: int) -> int:
    """Return the memory limit for a rank's tensors on the CPU, so that the kernel kills no process.

    All ranks share the free memory, leave a reserve for other programs, and need more than tensors.
    """
    besides = sum(term.high_bytes for term in outside_allocator(candidate, hardware))
    room = int(free_bytes * USABLE_SHARE) // candidate.layout.ranks - besides
    if room <= 0:
        raise Impossible(
            f"not enough memory for trials with {candidate.layout.ranks} ranks",
            why=f"{format_bytes(free_bytes)} are free here, and each rank needs up to "
            f"{format_bytes(besides)} in addition to its tensors",
            fix="stop other programs on this host, or request fewer ranks",
        )
    return room


def find_batch_size(
    work: Work,
    candidate: Candidate,
    *,
    hardware: Hardware,
    samples: int | None = None,
    limits_bytes: tuple[int, ...] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[int | None, list[Trial]]:
    """Find the largest micro-batch of a candidate on this machine, beginning with its own.

    ``samples`` is the number of samples of a rank in a step, if it is fixed. On the CPU each rank
    is limited to its share of the free memory, on an accelerator to the device; ``limits_bytes``
    sets other limits.
    """
    device: Literal["cpu", "gpu"] = "cpu" if hardware.card.kind == "cpu" else "gpu"
    if limits_bytes is None and device == "cpu":
        free_bytes = cpu.read_cpu().free_bytes or 0
        limit = limit_on_cpu(candidate, hardware, free_bytes=free_bytes)
        limits_bytes = (limit,) * candidate.layout.ranks

    def try_size(size: int) -> Trial:
        sized = with_size(candidate, size, samples=samples)
        ranks = run_real_steps(
            work, sized, device=device, steps=0, limits_bytes=limits_bytes, say=say
        )
        trial = Trial(micro_batch_size=size, ranks=ranks)
        say(str(trial))
        return trial

    return largest_batch(try_size, start=candidate.micro_batch_size, most=samples)


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
