"""How fast data can be read: the question to the ranks, and their answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.config.settings import Settings

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


def together(answers: Sequence[LoaderAnswer]) -> list[Read]:
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


def measure(
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
