"""Micro-batch sizes tried for real: each on ranks of its own, whose verdict is one for all."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from torchmuster.decision import Decision
from torchmuster.devices.for_model import USABLE_SHARE
from torchmuster.devices.readers import cpu
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory.device_terms import outside_allocator
from torchmuster.plan.proof import fresh_ranks
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.candidates import Look, Traces
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RankTrial:
    """What one rank met with in a trial."""

    rank: int
    ran_out: bool
    peak_bytes: int | None = None  # of tensors; None where it is not known
    limit_bytes: int | None = None  # what there was for them
    words: str = ""  # of the error, where memory ran out


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch size that was tried, and the ranks that had something to say."""

    micro_batch_size: int
    fits: bool
    ranks: tuple[RankTrial, ...]

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch_size}: {self._words()}"

    def _words(self) -> str:
        if not self.fits:
            out = [one for one in self.ranks if one.ran_out]
            if not out:
                return "the machine's memory ran out, and the kernel killed a rank"
            limits = f" of {_trials_size(out[0].limit_bytes)}" if out[0].limit_bytes else ""
            return f"{_trials_ranks([one.rank for one in out])} ran out of memory{limits}"
        tightest = self.tightest
        if tightest is None or tightest.peak_bytes is None:
            return "fits on all ranks"
        of = f" of {_trials_size(tightest.limit_bytes)}" if tightest.limit_bytes is not None else ""
        return f"fits on all ranks; rank {tightest.rank} has the least room: {_trials_size(tightest.peak_bytes)}{of}"

    @property
    def tightest(self) -> RankTrial | None:
        """The rank that has the least room left; without limits, the one that takes most."""
        known = [one for one in self.ranks if one.peak_bytes is not None]
        return min(known, key=_trials_room, default=None)


def _trials_room(one: RankTrial) -> int:
    return (one.limit_bytes or 0) - (one.peak_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest micro-batch that fits, None if not even one sample does; and how that is known."""

    micro_batch_size: int | None
    trials: tuple[Trial, ...]


class TryOne(Protocol):
    """Tries one size on fresh ranks."""

    def __call__(self, micro_batch_size: int) -> Trial:
        """Return what came of it."""


def find_largest_batch(
    try_one: TryOne,
    *,
    start: int,
    most: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Decision[LargestBatch]:
    """Find the largest micro-batch that fits, beginning with ``start``, what the plan expects.

    Tried are ``start``, powers of two and ``most``, none above it. Where the plan is right, two trials are enough:
    its size, and the next one.
    """
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        trial = try_one(size)
        trials.append(trial)
        say(str(trial))
        return trial.fits

    size = _largest(fits, start=start, most=most)
    found = LargestBatch(micro_batch_size=size, trials=tuple(trials))
    return Decision(value=found, reason=_reason(found, start=start, most=most))


def largest_expected(fits: Callable[[int], bool], *, start: int, most: int | None) -> int:
    """Return the largest micro-batch that fits by a plan's arithmetic; at least 1, where a search can begin."""
    return _largest(fits, start=start, most=most) or 1


# Where nothing limits a micro-batch, what fits is not looked for beyond this.
_LARGEST_SIZE = 2**20


def _largest(fits: Callable[[int], bool], *, start: int, most: int | None) -> int | None:
    """Return the largest size that fits, None if one sample does not; from the start one size after the other."""
    if start < 1:
        raise Impossible(
            f"asked for a micro-batch of {start} samples", fix="give a number from 1 on"
        )
    last = most or _LARGEST_SIZE
    powers = {1 << power for power in range(last.bit_length())}
    sizes = sorted({*powers, min(start, last), last})
    place = sizes.index(min(start, last))
    if fits(sizes[place]):
        while place + 1 < len(sizes) and fits(sizes[place + 1]):
            place += 1
        return sizes[place]
    return next((size for size in reversed(sizes[:place]) if fits(size)), None)


def _reason(found: LargestBatch, *, start: int, most: int | None) -> str:
    size = found.micro_batch_size
    if size is None:
        first = next(one for one in found.trials if one.micro_batch_size == 1)
        return f"not even a micro-batch of 1 fits: {str(first).partition(': ')[2]}"
    how = next(one for one in found.trials if one.micro_batch_size == size)
    expected = "as planned" if size == start else f"the plan expected {start}"
    reason = f"a micro-batch of {size} ({expected}): it {str(how).partition(': ')[2]}"
    larger = [one for one in found.trials if not one.fits]
    if larger:
        nearest = min(larger, key=lambda one: one.micro_batch_size)
        return f"{reason}; with {nearest.micro_batch_size}, {str(nearest).partition(': ')[2]}"
    return f"{reason}; a step has no more than {most} for a rank" if most is not None else reason


def _trials_ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers))}"


def _trials_size(count: int | None) -> str:
    return "an unknown size" if count is None else format_bytes(count)


PROGRAM = "torchmuster.plan.probes.batch_trial"


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """What the ranks of a trial are told."""

    work: Work
    candidate: Candidate
    device: Literal["auto", "cpu"]
    limits_bytes: tuple[int, ...] | None  # of tensors, for each rank; None: what its device has


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Tries micro-batch sizes of one way to train, on this machine.

    ``samples`` are those that a rank has in a step, where that is fixed: smaller micro-batches are then more of them, as
    the training has it. ``limits_bytes`` are kept to by the ranks themselves: on the CPU a program that takes too much is
    not told so, but killed, and others with it.
    """

    work: Work
    candidate: Candidate
    device: Literal["cpu", "gpu"] = "cpu"
    samples: int | None = None
    limits_bytes: tuple[int, ...] | None = None
    say: Callable[[str], None] = lambda _: None

    def __call__(self, micro_batch_size: int) -> Trial:
        """Try one size on fresh ranks; what fails for another reason than memory is raised."""
        ranks = self.candidate.layout.ranks
        candidate = with_size(self.candidate, micro_batch_size, samples=self.samples)
        request = TrialRequest(
            work=self.work,
            candidate=candidate,
            device="cpu" if self.device == "cpu" else "auto",
            limits_bytes=self.limits_bytes,
        )
        ran = fresh_ranks.run_fresh_ranks(
            PROGRAM,
            msgspec.json.encode(request).decode(),
            ranks=ranks,
            device=self.device,
            folder=str(Path(self.work.folder).absolute()),
            name="trial",
            doing=f"trying {candidate.accumulation} x {micro_batch_size} samples",
            say=self.say,
        )
        told = [msgspec.json.decode(ran.texts[rank], type=RankTrial) for rank in sorted(ran.texts)]
        return trial_verdict(micro_batch_size, told, ran.trouble, ranks=ranks)


def with_size(candidate: Candidate, size: int, *, samples: int | None) -> Candidate:
    """Return the same way with another micro-batch, in as many parts as a training would make of its samples."""
    accumulation = candidate.accumulation if samples is None else math.ceil(samples / size)
    return dataclasses.replace(candidate, micro_batch_size=size, accumulation=accumulation)


def trial_advice(size: int, candidate: Candidate, *, global_batch_size: int | None) -> str:
    """Return the flags that make a training use this micro-batch as it was tried.

    The plan's own global batch goes with the plan's micro-batch: where nobody fixed one, it changes too.
    """
    flags = f"--set train.micro_batch_size={size}"
    if global_batch_size is not None:
        return flags
    whole = with_size(candidate, size, samples=None).global_batch_size
    return f"{flags} --set train.global_batch_size={whole}"


def trial_verdict(
    micro_batch_size: int, told: Sequence[RankTrial], trouble: Finding | None, *, ranks: int
) -> Trial:
    """Return what a trial says: it fits only if every rank said so."""
    if any(one.ran_out for one in told) or (trouble and KERNEL_KILLED_IT in _trials_text(trouble)):
        out = tuple(one for one in told if one.ran_out)
        return Trial(micro_batch_size=micro_batch_size, fits=False, ranks=out)
    if trouble is not None or len(told) < ranks:
        raise MusterError(
            f"a trial with micro-batches of {micro_batch_size} failed, and not for want of memory",
            why=_trials_text(trouble)
            if trouble
            else f"{len(told)} of {ranks} ranks told how it went",
            fix=trouble.fix if trouble else "try again; the machine may be too busy",
        )
    return Trial(micro_batch_size=micro_batch_size, fits=True, ranks=tuple(told))


def _trials_text(finding: Finding) -> str:
    return "\n".join(part for part in (finding.what, finding.why, finding.evidence) if part)


def expected_memory(
    asked: PlanRequest,
    candidate: Candidate,
    *,
    look: Look,
    most: int | None = None,
) -> int:
    """Return the largest micro-batch that fits by the plan's arithmetic: where trials begin.

    On a CPU every size would have to be traced, so trials begin with that of the plan; so they do where the arithmetic
    does not reach.
    """
    hardware = asked.hardware
    if hardware.card.kind == "cpu":
        return candidate.micro_batch_size
    traces = Traces(asked, look)

    def fits(size: int) -> bool:
        one = with_size(candidate, size, samples=most)
        records = traces.of(one)  # those of other sizes say nothing of it
        if isinstance(records, TraceRefused):
            raise Impossible(records.what, why=records.why, fix=records.fix)
        needed = memory.predict_memory(records, one, hardware=hardware)
        return needed.total_bytes <= hardware.card.memory_bytes

    try:
        return largest_expected(fits, start=candidate.micro_batch_size, most=most)
    except Impossible:
        return candidate.micro_batch_size


def limit_on_cpu(candidate: Candidate, hardware: Hardware, *, free_bytes: int) -> int:
    """Return what the tensors of a rank may take on the CPU, so that it says no before the kernel kills.

    All ranks share what is free now, leave something for others, and are more than their tensors.
    """
    besides = sum(term.high_bytes for term in outside_allocator(candidate, hardware))
    room = int(free_bytes * USABLE_SHARE) // candidate.layout.ranks - besides
    if room <= 0:
        raise Impossible(
            f"there is no memory for trials with {candidate.layout.ranks} ranks",
            why=f"{format_bytes(free_bytes)} are free here, and each rank takes up to "
            f"{format_bytes(besides)} beside its tensors",
            fix="end what else runs here, or ask for fewer ranks",
        )
    return room


def find_batch_size(
    work: Work,
    candidate: Candidate,
    *,
    hardware: Hardware,
    start: int,
    most: int | None = None,
    limits_bytes: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Decision[LargestBatch]:
    """Find the largest micro-batch of a plan on this machine; ``start`` is what the plan expects.

    ``most`` are the samples that a rank has in a step, where that is fixed. On the CPU each rank keeps to its part of
    the memory that is free, on an accelerator to what there is. ``limits_bytes`` stand for ranks that have less.
    """
    ranks = candidate.layout.ranks
    on_cpu = hardware.card.kind == "cpu"
    if limits_bytes is not None and len(limits_bytes) != ranks:
        raise Impossible(
            f"asked for {ranks} ranks with {len(limits_bytes)} limits of memory",
            why="each rank has one",
            fix=f"give {ranks} limits",
        )
    if limits_bytes is None and on_cpu:
        free_bytes = cpu.read_cpu().free_bytes
        limit = limit_on_cpu(candidate, hardware, free_bytes=free_bytes or 0)
        limits_bytes = [limit] * ranks
    trials = Trials(
        work=work,
        candidate=candidate,
        device="cpu" if on_cpu else "gpu",
        samples=most,
        limits_bytes=None if limits_bytes is None else tuple(limits_bytes),
        say=say,
    )
    return find_largest_batch(trials, start=start, most=most, say=say)
