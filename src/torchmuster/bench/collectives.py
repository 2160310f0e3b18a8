"""Times of messages between ranks, by operation and size, on one or several hosts.

Each time is the time of the slowest rank, for which all others wait. (nccl-tests reports the mean over the
ranks by default.)
"""

import contextlib
import dataclasses
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from torchmuster.bench.probing import run_probe
from torchmuster.bench.record import Series
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.launch_job import launch_job
from torchmuster.launch.transports.ssh import SshTransport
from torchmuster.runfolder import RunFolder, create_run_folder

MARK = "torchmuster-answer "
TO_OUTPUT = "-"  # instead of a folder for answers
T = TypeVar("T")


class _Listening(TerminalConsole):
    """A console that collects output and findings, and prints the launcher's messages."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        super().__init__(run)
        self._say = say
        self.texts: dict[int, str] = defaultdict(str)
        self.findings: tuple[Finding, ...] = ()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Do not show the ranks' output."""
        yield

    def world(self, size: int) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Print which hosts have joined and which are missing."""
        self._say(text)

    def output(self, rank: int, text: str) -> None:
        """Collect the output: an answer may arrive in pieces."""
        self.texts[rank] += text

    def show(self, findings: Sequence[Finding]) -> None:
        """Collect the findings."""
        self.findings += tuple(findings)

    def finish(self) -> None:
        """Do nothing."""


def run_probe_on_machines(
    spec: JobSpec,
    request: object,
    answer: type[T],
    *,
    python: str | None = None,
    doing: str,
    say: Callable[[str], None] = lambda _: None,
) -> list[T]:
    """Run a probe module on the hosts of a job, and return the answers by rank.

    The job's command is the module alone. Its ``main`` gets the request as JSON, and ``-`` instead
    of a folder: then it answers with :func:`print_answer`.
    """
    (program,) = spec.command
    words = (program, msgspec.json.encode(request).decode(), TO_OUTPUT)
    spec = dataclasses.replace(spec, command=words, module=True)
    transport = SshTransport(
        spec.hosts, python or sys.executable, lost_after_s=spec.limits.lost_after_s
    )
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as place:
        run = create_run_folder(Path(place), spec.name)
        console = _Listening(run, say)
        code = launch_job(spec, transport, run, lambda _: console)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code in (ExitCode.TERMINATED, ExitCode.KILLED):
        raise SystemExit(code)
    if code != ExitCode.GOOD:
        raise _failed(doing, console.findings)
    found = answers_in(console.texts, answer)
    if not found or len(found) != len(console.texts):
        raise MusterError(
            f"{doing} failed",
            why=f"only {len(found)} of {len(console.texts)} ranks returned a result",
            fix="try again; no result was saved",
        )
    return found


def print_answer(text: str) -> None:
    """Print this rank's answer, for a rank on another host."""
    sys.stdout.write(f"{MARK}{text}\n")
    sys.stdout.flush()


def answers_in(texts: dict[int, str], answer: type[T]) -> list[T]:
    """Return the answers in the ranks' output, by rank; ranks without an answer are left out."""
    found = []
    for rank in sorted(texts):
        lines = [line for line in texts[rank].splitlines() if line.startswith(MARK)]
        if lines:
            found.append(msgspec.json.decode(lines[-1].removeprefix(MARK), type=answer))
    return found


def _failed(doing: str, findings: Sequence[Finding]) -> MusterError:
    if not findings:
        return MusterError(
            f"{doing} failed", why="the cause is unknown", fix="muster check --hosts …"
        )
    last = findings[-1]
    parts = (last.what, last.why, *last.evidence.splitlines())
    seen = "\n".join(part for part in parts if part and not part.startswith("log: "))
    return MusterError(f"{doing} failed", why=seen, fix=last.fix)


PROGRAM = "torchmuster.bench.probes.collectives"
SERIES = "collective"


@dataclass(frozen=True, kw_only=True)
class CollectivesRequest:
    """The request to each rank."""

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    device: Literal["cpu", "gpu"]
    least_sample_s: float = 0.06  # shorter samples measure 10 % less if ranks share cores


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One rank's seconds for messages of one kind and size: a sample for each round."""

    operation: str
    size_bytes: int  # as sent: the requested size, rounded down so that the ranks can share it
    seconds: tuple[float, ...]
    compared: int  # number of values checked on this rank
    wrong: int  # of them
    first_wrong: str = ""  # description of the first one


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """The result of one rank."""

    rank: int
    host: str
    device: str
    backend: str
    timed: tuple[Timed, ...]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Wrong values."""

    rank: int
    host: str
    operation: str
    size_bytes: int
    wrong: int
    compared: int
    first: str


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The times of all ranks: for each sample the slowest rank's seconds."""

    hosts: tuple[str, ...]  # by rank
    backend: str
    device: str
    times: Mapping[str, Mapping[int, tuple[float, ...]]]  # by operation and size
    compared: int
    wrong: tuple[Wrong, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.hosts)


def check_collectives_request(asked: CollectivesRequest, *, ranks: int) -> None:
    """Reject a request that cannot be measured, before starting anything."""
    if ranks < 2:
        raise Impossible(
            "cannot measure messages between ranks with one rank",
            why="messages need at least 2 ranks",
            fix="--ranks 2 or more",
        )
    smallest = 4 * ranks
    if min(asked.sizes_bytes) < smallest:
        raise Impossible(
            f"messages of {min(asked.sizes_bytes)} bytes cannot be split over {ranks} ranks",
            why="each rank needs at least one value of 4 bytes",
            fix=f"--smallest {smallest} or more",
        )


def measure_collectives(
    asked: CollectivesRequest,
    *,
    ranks: int,
    environment: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> MeasuredCollective:
    """Measure with this number of ranks on this host."""
    return join_rank_times(
        run_probe(
            PROGRAM,
            asked,
            CollectiveTimes,
            ranks=ranks,
            device=asked.device,
            environment=environment,
            doing="timing messages",
            say=say,
        )
    )


def measure_collectives_on(
    asked: CollectivesRequest,
    spec: JobSpec,
    *,
    python: str | None,
    say: Callable[[str], None] = lambda _: None,
) -> MeasuredCollective:
    """Measure with the ranks of a job, on its hosts."""
    return join_rank_times(
        run_probe_on_machines(
            dataclasses.replace(spec, command=(PROGRAM,)),
            asked,
            CollectiveTimes,
            python=python,
            doing="timing messages",
            say=say,
        )
    )


def join_rank_times(answers: Sequence[CollectiveTimes]) -> MeasuredCollective:
    """Merge the results of the ranks: the slowest rank determines each time."""
    first = answers[0]
    times: dict[str, dict[int, tuple[float, ...]]] = {}
    for place, timed in enumerate(first.timed):
        samples = zip(*(one.timed[place].seconds for one in answers), strict=True)
        times.setdefault(timed.operation, {})[timed.size_bytes] = tuple(map(max, samples))
    return MeasuredCollective(
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


def series_of(measured: MeasuredCollective) -> tuple[Series, ...]:
    """Return the times as series of a record; bandwidths are computed from them."""
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
    """Return sizes from the smallest to the largest, each ``factor`` times the previous one."""
    if not 0 < smallest_bytes <= largest_bytes:
        raise Impossible(
            f"no sizes between {smallest_bytes} and {largest_bytes} bytes",
            fix="--smallest 1KiB --largest 16MiB",
        )
    sizes = []
    size = smallest_bytes
    while size < largest_bytes:
        sizes.append(size)
        size *= factor
    return (*sizes, largest_bytes)
