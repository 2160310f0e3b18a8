"""The ranks of a notebook from the kernel's side: start, run cells, interrupt, stop.

All events arrive in one queue, from a thread for each rank and one for the launcher; the kernel's
main thread reads it and can be interrupted with Ctrl-C.
"""

import contextlib
import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import JobSpec
from torchmuster.notebook import launcher
from torchmuster.notebook.connection import Connection, RankListener
from torchmuster.notebook.launcher import Launcher
from torchmuster.notebook.messages import (
    SECRET_VARIABLE,
    Done,
    FromRank,
    Run,
    Wrote,
    new_secret,
)
from torchmuster.runfolder import DEFAULT_ROOT, create_run_folder


class Interrupts:
    """The number of interrupts requested."""

    count = 0

    def take_note(self, *_: object) -> None:
        """Count an interrupt; the signal handler."""
        self.count += 1


@contextlib.contextmanager
def collect_interrupts() -> Iterator[Interrupts]:
    """Collect interrupts: an exception at any line could leave ranks in different states."""
    asked = Interrupts()
    try:
        before = signal.signal(signal.SIGINT, asked.take_note)
    except ValueError:  # not in the main thread, which alone receives signals
        yield asked
        return
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


_LOOK_EVERY_S = 0.1
_LATE_OUTPUT_S = 0.6
_VERDICT_WITHIN_S = 10.0
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class Arrived(NamedTuple):
    """A rank has connected."""

    rank: int
    connection: Connection


class Heard(NamedTuple):
    """A message of a rank; None: it has disconnected."""

    rank: int
    message: FromRank | None


Event = Arrived | Heard | launcher.FromLauncher | None  # None: the launcher has exited


@dataclass(frozen=True, kw_only=True)
class OutputListener:
    """Callbacks while a cell runs: printed text, findings, finished ranks, and an interrupt."""

    wrote: Callable[[int, str], None]
    found: Callable[[Sequence[Finding]], None]
    passing: Callable[[Mapping[int, Done]], None]
    interrupted: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class RanksResult:
    """The results of the ranks that returned; ``stuck`` did not return before the second interrupt."""

    done: dict[int, Done]
    interrupted: bool = False
    stuck: tuple[int, ...] = ()


class Ranks:
    """Started by the constructor, usable after :meth:`wait_until_here`, stopped by :meth:`stop`."""

    def __init__(self, spec: JobSpec, root: Path = DEFAULT_ROOT) -> None:
        self.spec = spec
        self.run_folder = create_run_folder(root, "notebook")
        self.world_size = 0
        self._over = False
        self._requests = itertools.count()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._here: dict[int, Connection] = {}
        self._found: Finding | None = None
        secret = new_secret()
        self._entrance = RankListener(secret, self._arrived)
        spec = replace(
            spec,
            command=("torchmuster.notebook.rank_loop", str(self._entrance.port)),
            environment={**spec.environment, SECRET_VARIABLE: secret.hex()},
        )
        self._launcher = Launcher(self.run_folder, self._events.put)
        self._launcher.tell(
            launcher.LauncherOrder(spec=spec, run=str(self.run_folder.path.resolve()))
        )

    @property
    def alive(self) -> bool:
        """Whether cells can be run."""
        return not self._over and self._launcher.alive

    @property
    def refused(self) -> Sequence[str]:
        """The reasons of refused connections."""
        return tuple(self._entrance.refused)

    def wait_until_here(self, say: Callable[[str], None]) -> None:
        """Wait for all ranks, then stop listening; on failure, clean up everything."""
        try:
            while not self.world_size or len(self._here) < self.world_size:
                match self._events.get():
                    case launcher.Said(text=text):
                        say(text)
                    case event:
                        self._note(event)
        except BaseException:
            self.stop()
            raise
        self._entrance.close()

    def catch_up(self) -> None:
        """Process the events since the last cell; raise the reason if the ranks have exited."""
        shown_with_the_next_cell: list[Event] = []
        while not self._over and not self._events.empty():
            event = self._events.get()
            match event:
                case launcher.Printed() | Heard(message=Wrote()):
                    shown_with_the_next_cell.append(event)
                case _:
                    self._note(event)
        for event in shown_with_the_next_cell:
            self._events.put(event)

    def run(
        self, code: str, name: str, ranks: Collection[int], listener: OutputListener
    ) -> RanksResult:
        """Run a cell on some ranks, and wait for all of them.

        Ctrl-C interrupts them, and the cell ends when they have returned: a rank may be saving, or
        wait in a collective, which SIGINT does not interrupt. A second Ctrl-C stops waiting.
        """
        request = next(self._requests)
        running, done = set(ranks), dict[int, Done]()
        interrupted = False
        with collect_interrupts() as asked:
            for rank in ranks:
                self._here[rank].send(Run(request=request, name=name, code=code))
            while running and asked.count < 2:
                if asked.count and not interrupted:
                    interrupted = True
                    self._launcher.tell(launcher.Interrupt())
                    listener.interrupted()
                event = self._next()
                match event:
                    case Heard(rank=rank, message=Done() as message) if message.request == request:
                        done[rank] = message
                        running.discard(rank)
                    case _:
                        self._pass_on(event, listener)
                listener.passing(done)
            self._take_late_output(done, listener)
        return RanksResult(done=done, interrupted=asked.count > 0, stuck=tuple(sorted(running)))

    def stop(self) -> None:
        """Stop the ranks; request it twice, so that they are killed."""
        self._over = True
        self._launcher.end()
        for connection in self._here.values():
            connection.close()
        self._here.clear()
        self._entrance.close()

    # ---- events

    def _next(self) -> Event | Heard:
        try:
            return self._events.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            return launcher.Said("")

    def _pass_on(self, event: Event, listener: OutputListener) -> None:
        match event:
            case Heard(rank=rank, message=Wrote(text=text)):
                listener.wrote(rank, text)
            case launcher.Printed(rank=rank, text=text):
                listener.wrote(rank, text)
            case launcher.HostsFound(findings=findings):
                self._keep(findings)
                listener.found(findings)
            case _:
                self._note(event)

    def _note(self, event: Event) -> None:
        """Process events that concern every wait: connected and disconnected ranks."""
        match event:
            case Arrived(rank=rank, connection=connection):
                self._here[rank] = connection
                threading.Thread(
                    target=self._hear, args=(rank, connection), name=f"rank-{rank}", daemon=True
                ).start()
            case launcher.WorldReady(size=size):
                self.world_size = size
            case launcher.HostsFound(findings=findings):
                self._keep(findings)
            case Heard(rank=rank, message=None):
                self._await_verdict(rank)
            case launcher.Ended() | None:
                self._over = True
                raise self._why_over("the ranks have exited")

    def _keep(self, findings: Sequence[Finding]) -> None:
        """Store why the ranks exit; a hang that may recover does not count."""
        failures = [one for one in findings if one.status is Status.FAILURE]
        self._found = failures[-1] if failures else self._found

    def _await_verdict(self, rank: int) -> None:
        """Handle an exited rank: the launcher stops the others, and knows the reason."""
        deadline = time.monotonic() + _VERDICT_WITHIN_S
        while time.monotonic() < deadline:
            match self._next():
                case launcher.HostsFound(findings=findings):
                    self._keep(findings)
                case launcher.Ended() | None:
                    break
        self._over = True
        raise self._why_over(f"rank {rank} has exited")

    def _why_over(self, what: str) -> MusterError:
        again = "%muster restart  # then rerun the cells that define what you need"
        logs = f"logs: {self.run_folder.logs}"
        found = self._found
        if found is None:
            return MusterError(what, why=logs, fix=again)
        return MusterError(
            found.what, why=_ranks_lines(found.why, logs), fix=_ranks_lines(found.fix, again)
        )

    def _take_late_output(self, done: dict[int, Done], listener: OutputListener) -> None:
        """Wait for output through the logs, which arrives shortly after the cell's end."""
        late = {rank for rank, one in done.items() if one.wrote_to_log}
        deadline = time.monotonic() + _LATE_OUTPUT_S
        while late and time.monotonic() < deadline:
            event = self._next()
            self._pass_on(event, listener)
            if isinstance(event, launcher.Printed):
                late.discard(event.rank)

    # ---- threads

    def _arrived(self, rank: int, connection: Connection) -> None:
        self._events.put(Arrived(rank, connection))

    def _hear(self, rank: int, connection: Connection) -> None:
        while (message := connection.receive(_FROM_RANK)) is not None:
            self._events.put(Heard(rank, message))
        self._events.put(Heard(rank, None))


def _ranks_lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
