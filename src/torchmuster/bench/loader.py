"""How fast data can be read: the question to the ranks, and their answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status

# It is in worker/, the only room that makes data of settings; nothing of it is imported here.
PROGRAM = "torchmuster.worker.reading"
# What libraries read that compute with threads of their own beside torch.
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "POLARS_MAX_THREADS"),
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read: how many processes, and how far ahead."""

    workers: int
    prefetch: int = 2

    @property
    def name(self) -> str:
        """The way in words."""
        if not self.workers:
            return "0 workers"
        many = "s" if self.workers > 1 else ""
        ahead = "" if self.prefetch == 2 else f", prefetch {self.prefetch}"
        return f"{self.workers} worker{many}{ahead}"


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """What the ranks are told to do."""

    settings: Settings  # of which data and batches are used
    device: Literal["auto", "cpu"]
    readings: tuple[Reading, ...]
    rounds: int  # how often each is visited, in a drawn order
    window_s: float  # how long it is measured in each visit


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What one rank saw of one way to read, in one round."""

    reading: Reading
    first_batch_s: float  # from the beginning of an epoch, with the start of workers
    next_epoch_s: float  # the same with workers that are there already
    samples_s: tuple[float, ...]  # samples a second, turn by turn
    busy_cores: float | None  # that reading kept busy on average
    busy_threads: (
        int | None
    )  # that compute in a worker, or in the rank where there is none; at most
    indices: str  # a digest of which samples came first; empty where they have no numbers
    values: str  # a digest of what was in them


@dataclass(frozen=True, kw_only=True)
class LoaderAnswer:
    """What one rank saw."""

    rank: int
    device: str
    samples_per_step: int  # of this rank
    samples_per_batch: int  # that are read at once
    batch_bytes: int
    samples: int | None  # of an epoch, all ranks together; None: unknown before its end
    visits: tuple[Visit, ...]
    to_device_s: tuple[
        float, ...
    ] = ()  # of a batch, from ordinary memory; empty without an accelerator
    pinned_to_device_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Read:
    """All visits of all ranks to one way to read, together."""

    reading: Reading
    samples_s: tuple[float, ...]  # of the slowest rank, for which all others wait
    first_batch_s: tuple[float, ...]
    next_epoch_s: tuple[float, ...]
    busy_cores: float | None  # of all ranks
    busy_threads: int | None  # of one worker
    indices: tuple[str, ...]  # each digest once
    values: tuple[str, ...]

    @property
    def rate(self) -> Estimate:
        """Samples a second that a rank gets."""
        return estimate(self.samples_s)


def join_loader_answers(answers: Sequence[LoaderAnswer]) -> list[Read]:
    """Put the visits of all ranks together, by the way to read in the order of asking."""
    readings = sorted(
        {visit.reading for one in answers for visit in one.visits},
        key=lambda one: (one.workers, one.prefetch),
    )
    return [_together(reading, answers) for reading in readings]


def _together(reading: Reading, answers: Sequence[LoaderAnswer]) -> Read:
    by_rank = [[visit for visit in one.visits if visit.reading == reading] for one in answers]
    all_visits = [visit for visits in by_rank for visit in visits]
    cores = [one.busy_cores for one in all_visits]
    threads = [one.busy_threads for one in all_visits if one.busy_threads is not None]
    known_cores = [one for one in cores if one is not None]
    slowest = min(by_rank, key=lambda visits: estimate(_rates(visits)).median)
    return Read(
        reading=reading,
        samples_s=_rates(slowest),
        first_batch_s=tuple(one.first_batch_s for one in all_visits),
        next_epoch_s=tuple(one.next_epoch_s for one in all_visits),
        busy_cores=sum(known_cores) / len(known_cores) * len(answers) if known_cores else None,
        busy_threads=max(threads, default=None),
        # A rank's samples are its own; the same rank must get the same ones each time.
        indices=_each_once([[one.indices for one in visits] for visits in by_rank]),
        values=_each_once([[one.values for one in visits] for visits in by_rank]),
    )


def _rates(visits: Sequence[Visit]) -> tuple[float, ...]:
    return tuple(rate for one in visits for rate in one.samples_s)


def _each_once(by_rank: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return what the ranks had in each round, as one text a round, each text once."""
    return tuple(dict.fromkeys(" ".join(digests) for digests in zip(*by_rank, strict=True)))


def readings_for(cores: int, ranks: int) -> tuple[Reading, ...]:
    """Return the numbers of workers to try: none, and doubling from 1 to twice a rank's cores.

    More than there are cores can help where reading is waiting.
    """
    each = max(1, cores // ranks)
    numbers, workers = {0, each, 2 * each}, 1
    while workers < 2 * each:
        numbers.add(workers)
        workers *= 2
    return tuple(Reading(workers=one) for one in sorted(numbers))


def measure_loader(
    request: LoaderRequest,
    *,
    ranks: int,
    device: Literal["cpu", "gpu"],
    folder: str,
    say: Callable[[str], None],
    one_thread: bool = False,
) -> list[LoaderAnswer]:
    """Read with so many ranks at the same time; with ``one_thread`` libraries are told to compute with one."""
    return run_probe(
        PROGRAM,
        request,
        LoaderAnswer,
        ranks=ranks,
        device=device,
        folder=folder,
        environment=dict.fromkeys(THREAD_VARIABLES, "1") if one_thread else None,
        doing="reading data",
        say=say,
    )


# What is less than this slower than the fastest is as good.
EQUALLY_FAST = 0.05
# A training that takes so much of what the loader gives leaves room for a bad moment.
_ROOM = 0.9
_STILL_GROWING = 0.25
_WAITING = 0.5  # of its time a worker that waits keeps a core busy for less


def best_reading(reads: Sequence[Read], *, needed_samples_s: float | None = None) -> Decision[Read]:
    """Choose the fastest; of those that are as fast, or within its noise, the one with the fewest processes.

    With ``needed_samples_s`` the fewest that feed so many samples a second are enough.
    """
    fastest = max(reads, key=lambda one: one.rate.median)
    if needed_samples_s is not None:
        enough = [one for one in reads if one.rate.median * _ROOM >= needed_samples_s]
        if enough:
            chosen = min(enough, key=_cost)
            return Decision(
                value=chosen,
                reason=f"{_loader_rate(chosen)}, and {needed_samples_s:,.0f} are needed",
            )
        return Decision(
            value=fastest,
            reason=f"{_loader_rate(fastest)}, the most of all tried, and less than the "
            f"{needed_samples_s:,.0f} that are needed with a little room",
        )
    as_good = min(fastest.rate.low, fastest.rate.median * (1 - EQUALLY_FAST))
    equal = [one for one in reads if one.rate.median >= as_good]
    chosen = min(equal, key=_cost)
    beside = [one for one in reads if one is not chosen]
    words = ", ".join(
        f"{one.reading.name} {_loader_rate(one, short=True)} ({_loader_percent(one, chosen)})"
        for one in beside
    )
    why = "the fastest" if chosen is fastest else "as fast as any, with fewer processes"
    if chosen is not fastest and chosen.reading.workers == fastest.reading.workers:
        why = "as fast as any, with fewer batches in memory"
    return Decision(
        value=chosen,
        reason=f"{_loader_rate(chosen)}, {why}" + (f"; {words}" if words else ""),
    )


def _cost(one: Read) -> tuple[int, int]:
    return one.reading.workers, one.reading.prefetch


def _loader_rate(one: Read, *, short: bool = False) -> str:
    return f"{one.rate.median:,.0f}" + ("" if short else " samples/s")


def _loader_percent(one: Read, other: Read) -> str:
    return f"{(one.rate.median / other.rate.median - 1) * 100:+.0f} %"


def feeding(read: Read, *, samples_per_step: int, needed_samples_s: float | None) -> Finding:
    """Say how short a step may be before it waits for data, or whether what is needed is fed."""
    rate = read.rate.median
    step = f"a step of {samples_per_step} samples"
    what = (
        f"{read.reading.name} feed {rate:,.0f} samples/s to a rank: enough where {step} takes "
        f"{_milliseconds(samples_per_step / rate)} or more"
    )
    if needed_samples_s is None or rate * _ROOM >= needed_samples_s:
        return Finding(
            name="data-rate",
            status=Status.OK,
            what=what,
            why="shorter steps would wait for data, however fast the device is",
        )
    return Finding(
        name="data-rate",
        status=Status.FAILURE,
        what=f"{rate:,.0f} samples/s can be read, and {needed_samples_s:,.0f} are needed: the device would "
        f"wait {max(0.0, 1 - rate / needed_samples_s) * 100:.0f} % of the time",
        why="no number of workers that was tried is enough",
        fix="make a sample cheaper to read (decode, resize and tokenise once, beforehand), or read from a "
        "faster disk",
    )


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def more_might_help(reads: Sequence[Read], chosen: Read) -> Finding | None:
    """Say so where the largest number of workers that was tried was still much faster than the one before."""
    by_workers = sorted(reads, key=_cost)
    if len(by_workers) < 2 or chosen is not by_workers[-1] or not chosen.reading.workers:
        return None
    gained = chosen.rate.median / by_workers[-2].rate.median - 1
    if gained < _STILL_GROWING:
        return None
    more = chosen.reading.workers * 2
    return Finding(
        name="data-more-workers",
        status=Status.NOTE,
        what=f"more workers might read still more: {chosen.reading.name} gave {gained * 100:.0f} % more "
        f"than {by_workers[-2].reading.name}",
        why="reading is mostly waiting here (a disk, a network), so it needs no cores of its own"
        if chosen.busy_cores is not None and chosen.busy_cores < _WAITING * chosen.reading.workers
        else "the most that was tried was not the most that helps",
        fix=f"muster bench data --workers {chosen.reading.workers} {more} {2 * more}  # with the same data",
    )


def same_data(reads: Sequence[Read]) -> Finding:
    """Say whether every way to read gave the same samples with the same content."""
    indices = {digest for one in reads for digest in one.indices}
    values = {digest for one in reads for digest in one.values}
    if len(indices) > 1:
        return Finding(
            name="data-same",
            status=Status.FAILURE,
            what="other samples come first with another number of workers",
            why="a training would depend on how many workers read for it",
            fix="let the dataset give the same sample for the same number, in each process",
        )
    if len(values) <= 1:
        return Finding(
            name="data-same",
            status=Status.OK,
            what="every way to read gave the same samples, bit by bit, in the same order",
        )
    by_workers = {digest for one in reads if one.reading.workers for digest in one.values}
    if len(by_workers) <= 1:
        return Finding(
            name="data-same",
            status=Status.NOTE,
            what="the same samples came in the same order; what the dataset draws at random differs "
            "between no workers and some",
            why="workers draw by what they read, and give the same in any number; without workers the "
            "dataset draws from the rank's own random numbers",
        )
    return Finding(
        name="data-same",
        status=Status.WARNING,
        what="the same samples came in the same order, but with another content each time they were read",
        why="the dataset draws from something that no seed reaches: the time, the system, or a generator "
        "of its own that it seeds anew",
        fix="draw with Python's random, torch or numpy.random, which are seeded for each batch",
    )


def oversubscription(reads: Sequence[Read], *, cores: int, ranks: int) -> Finding | None:
    """Say so where workers compute with several threads each, and there are not enough cores for them."""
    crowded = [
        one
        for one in reads
        if one.reading.workers
        and (one.busy_threads or 0) > 1
        and one.reading.workers * ranks * (one.busy_threads or 0) > cores
    ]
    if not crowded:
        return None
    first = crowded[0]
    threads = first.busy_threads or 0
    total = first.reading.workers * ranks * threads
    variables = " ".join(f"{name}=1" for name in THREAD_VARIABLES[:3])
    return Finding(
        name="data-threads",
        status=Status.WARNING,
        what=f"each worker computes with {threads} threads: {first.reading.name} make {total} on "
        f"{cores} core{'s' if cores > 1 else ''}"
        + (f", for each of {ranks} ranks" if ranks > 1 else ""),
        why="threads that wait for a core slow down those that have one; workers are already as many as "
        "compute at once. torch is told to use one thread in a worker; this dataset, or a library it "
        "calls, uses more",
        fix=f"{variables} muster train …\n"
        "in the dataset: torch.set_num_threads(1), cv2.setNumThreads(0), or the same of the library",
    )


def one_thread_gain(usual: Read, alone: Read) -> Finding:
    """Say what one thread for each worker gave, measured."""
    ratio = alone.rate.median / usual.rate.median
    helped = ratio > 1 + EQUALLY_FAST
    what = (
        f"with one thread for each worker, {alone.reading.name} read {alone.rate.median:,.0f} samples/s "
        f"instead of {usual.rate.median:,.0f} ({(ratio - 1) * 100:+.0f} %)"
    )
    return Finding(
        name="data-one-thread",
        status=Status.NOTE,
        what=what,
        why="the variables do it: set them for the training"
        if helped
        else "the variables change nothing here: if threads are the trouble, the dataset sets them itself",
    )
