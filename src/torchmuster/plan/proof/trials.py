"""Try micro-batch sizes with real steps, each on fresh ranks; a size must fit on all of them."""

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
    """The result of one rank in a trial."""

    rank: int
    ran_out: bool
    peak_bytes: int | None = None  # of tensors; None if unknown
    limit_bytes: int | None = None  # available for tensors
    words: str = ""  # the error message, if memory ran out


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch size that was tried, and the results of the ranks."""

    micro_batch_size: int
    fits: bool
    ranks: tuple[RankTrial, ...]

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch_size}: {self._words()}"

    def _words(self) -> str:
        if not self.fits:
            out = [one for one in self.ranks if one.ran_out]
            if not out:
                return "the host ran out of memory, and the kernel killed a rank"
            limits = f" of {_trials_size(out[0].limit_bytes)}" if out[0].limit_bytes else ""
            return f"{_trials_ranks([one.rank for one in out])} ran out of memory{limits}"
        tightest = self.tightest
        if tightest is None or tightest.peak_bytes is None:
            return "fits on all ranks"
        of = f" of {_trials_size(tightest.limit_bytes)}" if tightest.limit_bytes is not None else ""
        return (
            f"fits on all ranks; rank {tightest.rank} has the least free memory: "
            f"{_trials_size(tightest.peak_bytes)}{of} used"
        )

    @property
    def tightest(self) -> RankTrial | None:
        """The rank with the least free memory; without limits, the one that uses the most."""
        known = [one for one in self.ranks if one.peak_bytes is not None]
        return min(known, key=_trials_room, default=None)


def _trials_room(one: RankTrial) -> int:
    return (one.limit_bytes or 0) - (one.peak_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest micro-batch that fits (None if not even one sample does), and the trials."""

    micro_batch_size: int | None
    trials: tuple[Trial, ...]


class TryOne(Protocol):
    """Try one size on fresh ranks."""

    def __call__(self, micro_batch_size: int) -> Trial:
        """Return the trial."""


def find_largest_batch(
    try_one: TryOne,
    *,
    start: int,
    most: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Decision[LargestBatch]:
    """Find the largest micro-batch that fits, beginning with ``start``, the plan's expectation.

    Tries ``start``, powers of two and ``most``, none above it. If the plan is right, two trials are
    enough: its size, and the next one.
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
    """Return the largest micro-batch that fits by a plan's arithmetic; at least 1."""
    return _largest(fits, start=start, most=most) or 1


# Where nothing limits a micro-batch, larger sizes than this are not tried.
_LARGEST_SIZE = 2**20


def _largest(fits: Callable[[int], bool], *, start: int, most: int | None) -> int | None:
    """Return the largest size that fits, None if one sample does not; tries sizes in order."""
    if start < 1:
        raise Impossible(
            f"a micro-batch of {start} samples was requested", fix="give a number of at least 1"
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
    return f"{reason}; a step has at most {most} per rank" if most is not None else reason


def _trials_ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers))}"


def _trials_size(count: int | None) -> str:
    return "an unknown size" if count is None else format_bytes(count)


PROGRAM = "torchmuster.plan.probes.batch_trial"


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """The request to the ranks of a trial."""

    work: Work
    candidate: Candidate
    device: Literal["auto", "cpu"]
    limits_bytes: tuple[int, ...] | None  # of tensors, for each rank; None: what its device has


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Try micro-batch sizes of one candidate on this machine.

    ``samples`` is the number of samples of a rank in a step, if fixed: smaller micro-batches then
    mean more micro-batches, as in training. The ranks enforce ``limits_bytes`` themselves: on the
    CPU a process that uses too much memory gets no error, but is killed, possibly together with
    other processes.
    """

    work: Work
    candidate: Candidate
    device: Literal["cpu", "gpu"] = "cpu"
    samples: int | None = None
    limits_bytes: tuple[int, ...] | None = None
    say: Callable[[str], None] = lambda _: None

    def __call__(self, micro_batch_size: int) -> Trial:
        """Try one size on fresh ranks; raise a failure that is not out of memory."""
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
    """Return the candidate with another micro-batch size, and accumulation to match its samples."""
    accumulation = candidate.accumulation if samples is None else math.ceil(samples / size)
    return dataclasses.replace(candidate, micro_batch_size=size, accumulation=accumulation)


def trial_advice(size: int, candidate: Candidate, *, global_batch_size: int | None) -> str:
    """Return the flags with which a run uses this micro-batch as tried.

    Without a fixed global batch size, the global batch changes with the micro-batch.
    """
    flags = f"--set train.micro_batch_size={size}"
    if global_batch_size is not None:
        return flags
    whole = with_size(candidate, size, samples=None).global_batch_size
    return f"{flags} --set train.global_batch_size={whole}"


def trial_verdict(
    micro_batch_size: int, told: Sequence[RankTrial], trouble: Finding | None, *, ranks: int
) -> Trial:
    """Return the result of a trial: it fits only if it fits on every rank."""
    if any(one.ran_out for one in told) or (trouble and KERNEL_KILLED_IT in _trials_text(trouble)):
        out = tuple(one for one in told if one.ran_out)
        return Trial(micro_batch_size=micro_batch_size, fits=False, ranks=out)
    if trouble is not None or len(told) < ranks:
        raise MusterError(
            f"a trial with micro-batches of {micro_batch_size} failed, but not for lack of memory",
            why=_trials_text(trouble)
            if trouble
            else f"{len(told)} of {ranks} ranks reported a result",
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
    """Return the largest micro-batch that fits by the plan's arithmetic: where trials start.

    On a CPU every size would need a trace, so trials start with the plan's size; the same if the
    arithmetic is not possible.
    """
    hardware = asked.hardware
    if hardware.card.kind == "cpu":
        return candidate.micro_batch_size
    traces = Traces(asked, look)

    def fits(size: int) -> bool:
        one = with_size(candidate, size, samples=most)
        records = traces.of(one)  # traces of other sizes do not apply
        if isinstance(records, TraceRefused):
            raise Impossible(records.what, why=records.why, fix=records.fix)
        needed = memory.predict_memory(records, one, hardware=hardware)
        return needed.total_bytes <= hardware.card.memory_bytes

    try:
        return largest_expected(fits, start=candidate.micro_batch_size, most=most)
    except Impossible:
        return candidate.micro_batch_size


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
    start: int,
    most: int | None = None,
    limits_bytes: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Decision[LargestBatch]:
    """Find the largest micro-batch of a plan on this machine; ``start`` is the plan's expectation.

    ``most`` is the number of samples of a rank in a step, if fixed. On the CPU each rank is limited
    to its share of the free memory, on an accelerator to the device. ``limits_bytes`` sets lower
    limits.
    """
    ranks = candidate.layout.ranks
    on_cpu = hardware.card.kind == "cpu"
    if limits_bytes is not None and len(limits_bytes) != ranks:
        raise Impossible(
            f"{len(limits_bytes)} memory limits were given for {ranks} ranks",
            why="each rank needs one limit",
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
