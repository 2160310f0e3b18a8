"""Data loading speed: request to the ranks, their answer and the choice of workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.units import plural

# In the package with torch that builds data from settings; not imported here.
PROGRAM = "torchmuster.worker.reading"
# Variables of libraries that use their own threads in addition to torch.
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "POLARS_MAX_THREADS"),
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One loader configuration: the number of workers."""

    workers: int

    @property
    def name(self) -> str:
        """The configuration as text."""
        return plural(self.workers, "worker")


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """The request to the ranks."""

    settings: Settings  # data and batch settings are used
    device: Literal["auto", "cpu"]
    readings: tuple[Reading, ...]
    rounds: int  # samples of each configuration, in random order
    window_s: float  # duration of each sample


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The result of one rank for one configuration, in one round."""

    reading: Reading
    first_batch_s: float  # from the start of an epoch, including worker startup
    next_epoch_s: float  # the same with running workers
    samples_s: tuple[float, ...]  # samples a second, turn by turn
    busy_cores: float | None  # used by reading, on average
    busy_threads: (
        int | None
    )  # maximum number of computing threads in a worker, or in the rank without workers
    indices: str  # a digest of the first sample indices; empty if samples have no indices
    values: str  # a digest of their content


@dataclass(frozen=True, kw_only=True)
class LoaderAnswer:
    """The result of one rank."""

    rank: int
    device: str
    samples_per_step: int  # of this rank
    samples_per_batch: int  # that are read at once
    batch_bytes: int
    samples: int | None  # per epoch, over all ranks; None: unknown before its end
    visits: tuple[Visit, ...]
    to_device_s: tuple[
        float, ...
    ] = ()  # of a batch, from ordinary memory; empty without an accelerator
    pinned_to_device_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Read:
    """The merged results of all ranks and rounds for one configuration."""

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
        """Samples/s per rank."""
        return estimate(self.samples_s)


def join_loader_answers(answers: Sequence[LoaderAnswer]) -> list[Read]:
    """Merge the results of all ranks by configuration, in the order of the request."""
    readings = sorted(
        {visit.reading for one in answers for visit in one.visits},
        key=lambda one: one.workers,
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
        # Ranks read different samples; the same rank must get the same ones each time.
        indices=_each_once([[one.indices for one in visits] for visits in by_rank]),
        values=_each_once([[one.values for one in visits] for visits in by_rank]),
    )


def _rates(visits: Sequence[Visit]) -> tuple[float, ...]:
    return tuple(rate for one in visits for rate in one.samples_s)


def _each_once(by_rank: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the ranks' digests of each round as one text, without duplicates."""
    return tuple(dict.fromkeys(" ".join(digests) for digests in zip(*by_rank, strict=True)))


def readings_for(cores: int, ranks: int) -> tuple[Reading, ...]:
    """Return the numbers of workers to try: 0, and doubling from 1 to twice a rank's cores.

    More workers than cores can help if reading is I/O-bound.
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
    """Measure with this number of ranks at once; ``one_thread`` limits libraries to one thread."""
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


# Configurations within this margin of the fastest count as equal.
EQUALLY_FAST = 0.05
# The training may use this share of the loader's rate; the rest is headroom.
_ROOM = 0.9
_STILL_GROWING = 0.25
_WAITING = 0.5  # an I/O-bound worker uses a core for a smaller share of the time


def best_reading(reads: Sequence[Read], *, needed_samples_s: float | None = None) -> Decision[Read]:
    """Choose the fastest configuration; among equals the one with the fewest processes.

    With ``needed_samples_s``, choose the fewest processes that reach this rate.
    """
    fastest = max(reads, key=lambda one: one.rate.median)
    if needed_samples_s is not None:
        enough = [one for one in reads if one.rate.median * _ROOM >= needed_samples_s]
        if enough:
            chosen = min(enough, key=lambda read: read.reading.workers)
            return Decision(
                value=chosen,
                reason=f"{_loader_rate(chosen)}; {needed_samples_s:,.0f} are needed",
            )
        return Decision(
            value=fastest,
            reason=f"{_loader_rate(fastest)}, the highest rate measured, but less than the "
            f"{needed_samples_s:,.0f} needed plus headroom",
        )
    as_good = min(fastest.rate.low, fastest.rate.median * (1 - EQUALLY_FAST))
    equal = [one for one in reads if one.rate.median >= as_good]
    chosen = min(equal, key=lambda read: read.reading.workers)
    beside = [one for one in reads if one is not chosen]
    words = ", ".join(
        f"{one.reading.name} {_loader_rate(one, short=True)} ({_loader_percent(one, chosen)})"
        for one in beside
    )
    why = "the fastest" if chosen is fastest else "as fast as the fastest, with fewer processes"
    return Decision(
        value=chosen,
        reason=f"{_loader_rate(chosen)}, {why}" + (f"; {words}" if words else ""),
    )


def _loader_rate(one: Read, *, short: bool = False) -> str:
    return f"{one.rate.median:,.0f}" + ("" if short else " samples/s")


def _loader_percent(one: Read, other: Read) -> str:
    return f"{(one.rate.median / other.rate.median - 1) * 100:+.0f} %"


def feeding(read: Read, *, samples_per_step: int, needed_samples_s: float | None) -> Finding:
    """Report the shortest step that does not wait for data, or whether the needed rate is reached."""
    rate = read.rate.median
    step = f"a step of {samples_per_step} samples"
    what = (
        f"{read.reading.name} read {rate:,.0f} samples/s per rank: enough if {step} takes "
        f"{_milliseconds(samples_per_step / rate)} or more"
    )
    if needed_samples_s is None or rate * _ROOM >= needed_samples_s:
        return Finding(
            name="data-rate",
            status=Status.OK,
            what=what,
            why="shorter steps would wait for data",
        )
    return Finding(
        name="data-rate",
        status=Status.FAILURE,
        what=f"{rate:,.0f} samples/s can be read, and {needed_samples_s:,.0f} are needed: the device would "
        f"wait {max(0.0, 1 - rate / needed_samples_s) * 100:.0f} % of the time",
        why="none of the measured numbers of workers is enough",
        fix="preprocess the data (decode, resize and tokenize once), or read from a faster disk",
    )


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def more_might_help(reads: Sequence[Read], chosen: Read) -> Finding | None:
    """Report if the largest number of workers was still much faster than the next smaller one."""
    by_workers = sorted(reads, key=lambda read: read.reading.workers)
    if len(by_workers) < 2 or chosen is not by_workers[-1] or not chosen.reading.workers:
        return None
    gained = chosen.rate.median / by_workers[-2].rate.median - 1
    if gained < _STILL_GROWING:
        return None
    more = chosen.reading.workers * 2
    return Finding(
        name="data-more-workers",
        status=Status.NOTE,
        what=f"more workers may be faster: {chosen.reading.name} read {gained * 100:.0f} % more "
        f"than {by_workers[-2].reading.name}",
        why="reading is I/O-bound here (disk, network), so more workers than cores can help"
        if chosen.busy_cores is not None and chosen.busy_cores < _WAITING * chosen.reading.workers
        else "the rate still grew at the largest number of workers measured",
        fix=f"muster bench data --workers {chosen.reading.workers} {more} {2 * more}  # with the same data",
    )


def same_data(reads: Sequence[Read]) -> Finding:
    """Report whether every configuration read the same samples with the same content."""
    indices = {digest for one in reads for digest in one.indices}
    values = {digest for one in reads for digest in one.values}
    if len(indices) > 1:
        return Finding(
            name="data-same",
            status=Status.FAILURE,
            what="the sample order depends on the number of workers",
            why="training results would depend on the number of workers",
            fix="return the same sample for the same index in every process",
        )
    if len(values) <= 1:
        return Finding(
            name="data-same",
            status=Status.OK,
            what="every configuration read the same samples, bit for bit, in the same order",
        )
    by_workers = {digest for one in reads if one.reading.workers for digest in one.values}
    if len(by_workers) <= 1:
        return Finding(
            name="data-same",
            status=Status.NOTE,
            what="same samples in the same order; the dataset's random values differ between 0 "
            "workers "
            "and 1 or more",
            why="workers are seeded per batch, so their number does not matter; without workers "
            "the "
            "dataset uses the rank's own random generators",
        )
    return Finding(
        name="data-same",
        status=Status.WARNING,
        what="same samples in the same order, but with different content each time",
        why="the dataset uses random values that are not seeded: from the clock, from the operating "
        "system, or from a generator that it reseeds itself",
        fix="use Python's random, torch or numpy.random, which are seeded for each batch",
    )


def oversubscription(reads: Sequence[Read], *, cores: int, ranks: int) -> Finding | None:
    """Report workers that use several threads each, if there are not enough cores."""
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
        what=f"each worker uses {threads} threads: {first.reading.name} use {total} on "
        f"{cores} core{'s' if cores > 1 else ''}"
        + (f", for each of {ranks} ranks" if ranks > 1 else ""),
        why="more threads than cores slow each other down. torch uses one thread per worker; this "
        "dataset, or a library it calls, uses more",
        fix=f"{variables} muster train …\n"
        "in the dataset: torch.set_num_threads(1), cv2.setNumThreads(0), or the library's "
        "equivalent",
    )


def one_thread_gain(usual: Read, alone: Read) -> Finding:
    """Report the measured effect of one thread per worker."""
    ratio = alone.rate.median / usual.rate.median
    helped = ratio > 1 + EQUALLY_FAST
    what = (
        f"with one thread per worker, {alone.reading.name} read {alone.rate.median:,.0f} samples/s "
        f"instead of {usual.rate.median:,.0f} ({(ratio - 1) * 100:+.0f} %)"
    )
    return Finding(
        name="data-one-thread",
        status=Status.NOTE,
        what=what,
        why="set these variables for the training"
        if helped
        else "the variables have no effect here: the dataset may set its threads itself",
    )
