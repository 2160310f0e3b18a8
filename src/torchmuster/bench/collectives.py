"""What messages between ranks take, by kind and size: on ranks of this machine, or of several.

A time is the slowest rank's, for which all others wait. (nccl-tests gives the mean over the ranks unless asked otherwise.)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.on_machines import run_probe_on_machines
from torchmuster.bench.probing import run_probe
from torchmuster.bench.record import Series
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec

PROGRAM = "torchmuster.bench.probes.collectives"
SERIES = "collective"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What each rank is told."""

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    device: Literal["cpu", "gpu"]
    least_sample_s: float = 0.06  # shorter ones read 10 % lower where ranks share cores


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One rank's seconds for messages of one kind and size: a sample for each round."""

    operation: str
    size_bytes: int  # as sent: the asked size, rounded down to what the ranks can share
    seconds: tuple[float, ...]
    compared: int  # values of this rank that were looked at
    wrong: int  # of them
    first_wrong: str = ""  # which, in words


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank saw."""

    rank: int
    host: str
    device: str
    backend: str
    timed: tuple[Timed, ...]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Values that were not what they must be."""

    rank: int
    host: str
    operation: str
    size_bytes: int
    wrong: int
    compared: int
    first: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What all ranks together took: of each sample the slowest rank's seconds."""

    hosts: tuple[str, ...]  # by rank
    backend: str
    device: str
    times: Mapping[str, Mapping[int, tuple[float, ...]]]  # by operation and size
    compared: int
    wrong: tuple[Wrong, ...]

    @property
    def ranks(self) -> int:
        """How many there were."""
        return len(self.hosts)


def check(asked: Asked, *, ranks: int) -> None:
    """Refuse what cannot be measured, before anything is started."""
    if ranks < 2:
        raise Impossible(
            "asked for messages between ranks, with one rank",
            why="it has nobody to talk to",
            fix="--ranks 2 or more",
        )
    smallest = 4 * ranks
    if min(asked.sizes_bytes) < smallest:
        raise Impossible(
            f"messages of {min(asked.sizes_bytes)} bytes cannot be shared by {ranks} ranks",
            why="each rank has at least one number of 4 bytes",
            fix=f"--smallest {smallest} or more",
        )


def measure(
    asked: Asked,
    *,
    ranks: int,
    environment: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure with so many ranks of this machine."""
    return together(
        run_probe(
            PROGRAM,
            asked,
            RankTimes,
            ranks=ranks,
            device=asked.device,
            environment=environment,
            doing="timing messages",
            say=say,
        )
    )


def measure_on(
    asked: Asked,
    spec: JobSpec,
    *,
    python: str | None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure with the ranks of a job, on the machines that it names."""
    return together(
        run_probe_on_machines(
            dataclasses.replace(spec, command=(PROGRAM,)),
            asked,
            RankTimes,
            python=python,
            doing="timing messages",
            say=say,
        )
    )


def together(answers: Sequence[RankTimes]) -> Measured:
    """Put together what the ranks saw: who waits for a message waits for the slowest."""
    first = answers[0]
    times: dict[str, dict[int, tuple[float, ...]]] = {}
    for place, timed in enumerate(first.timed):
        samples = zip(*(one.timed[place].seconds for one in answers), strict=True)
        times.setdefault(timed.operation, {})[timed.size_bytes] = tuple(map(max, samples))
    return Measured(
        hosts=tuple(one.host for one in answers),
        backend=first.backend,
        device=first.device,
        times=times,
        compared=sum(timed.compared for one in answers for timed in one.timed),
        wrong=tuple(
            Wrong(
                rank=one.rank,
                host=one.host,
                operation=timed.operation,
                size_bytes=timed.size_bytes,
                wrong=timed.wrong,
                compared=timed.compared,
                first=timed.first_wrong,
            )
            for one in answers
            for timed in one.timed
            if timed.wrong
        ),
    )


def series_of(measured: Measured) -> tuple[Series, ...]:
    """Return the times as a record keeps them; bandwidths follow from them."""
    return tuple(
        Series(
            name=SERIES,
            unit="s",
            better="lower",
            samples=samples,
            labels={"operation": operation, "size_bytes": size, "ranks": measured.ranks},
        )
        for operation, by_size in measured.times.items()
        for size, samples in by_size.items()
    )


def sizes_between(smallest_bytes: int, largest_bytes: int, factor: int = 4) -> tuple[int, ...]:
    """Return sizes from the smallest on, each so many times the one before, and the largest."""
    if not 0 < smallest_bytes <= largest_bytes:
        raise Impossible(
            f"there are no sizes from {smallest_bytes} to {largest_bytes} bytes",
            fix="--smallest 1KiB --largest 16MiB",
        )
    sizes = []
    size = smallest_bytes
    while size < largest_bytes:
        sizes.append(size)
        size *= factor
    return (*sizes, largest_bytes)
