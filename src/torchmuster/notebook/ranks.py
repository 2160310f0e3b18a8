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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import JobSpec
from torchmuster.notebook.launcher import Launcher
from torchmuster.notebook.listener import RankListener
from torchmuster.notebook.messages import (
    SECRET_VARIABLE,
    Done,
    Ended,
    Found,
    FromLauncher,
    FromRank,
    Interrupt,
    Printed,
    Run,
    Said,
    WorldReady,
    Wrote,
    new_secret,
    receive,
    send,
)
from torchmuster.notebook.shown import CellShown
from torchmuster.runfolder import DEFAULT_ROOT, create_run_folder

_LOOK_EVERY_S = 0.1
_LATE_OUTPUT_S = 0.6
_VERDICT_WITHIN_S = 10.0
_MESSAGE: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class Arrived(NamedTuple):
    """A rank has connected."""

    rank: int
    connection: Connection


class Received(NamedTuple):
    """A message of a rank; None: it has disconnected."""

    rank: int
    message: FromRank | None


Event = Arrived | Received | FromLauncher | None  # None: the launcher has exited


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The results of the ranks that returned; ``stuck`` did not return before the second interrupt."""

    done: dict[int, Done]
    interrupted: bool = False
    stuck: tuple[int, ...] = ()


class Ranks:
    """Started by the constructor, usable after :meth:`wait_until_ready`, stopped by :meth:`stop`."""

    def __init__(self, spec: JobSpec, root: Path = DEFAULT_ROOT) -> None:
        self.spec = spec
        self.run_folder = create_run_folder(root, "notebook")
        self.world_size = 0
        self._over = False
        self._requests = itertools.count()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._connections: dict[int, Connection] = {}
        self._failure: Finding | None = None
        secret = new_secret()
        self._listener = RankListener(
            secret, lambda rank, connection: self._events.put(Arrived(rank, connection))
        )
        spec = replace(
            spec,
            command=("torchmuster.notebook.rank_loop", str(self._listener.port)),
            environment={**spec.environment, SECRET_VARIABLE: secret.hex()},
        )
        self._launcher = Launcher(spec, self.run_folder, self._events.put)

    @property
    def alive(self) -> bool:
        """Whether cells can be run."""
        return not self._over and self._launcher.alive

    @property
    def refused(self) -> Sequence[str]:
        """The reasons of refused connections."""
        return tuple(self._listener.refused)

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Wait for all ranks, then stop listening; on failure, clean up everything."""
        try:
            while not self.world_size or len(self._connections) < self.world_size:
                event = self._events.get()
                if isinstance(event, Said):
                    say(event.text)
                self._note(event)
        except BaseException:
            self.stop()
            raise
        self._listener.close()

    def catch_up(self) -> None:
        """Process the events since the last cell; raise the reason if the ranks have exited."""
        printed: list[Event] = []
        for _ in range(self._events.qsize()):
            event = self._events.get()
            match event:
                case Printed() | Received(message=Wrote()):
                    printed.append(event)
                case _:
                    self._note(event)
        for event in printed:  # shown with the next cell
            self._events.put(event)

    def run(self, code: str, name: str, ranks: Collection[int], view: CellShown) -> CellResult:
        """Run a cell on some ranks, and wait for all of them.

        Ctrl-C interrupts them, and the cell ends when they have returned: a rank may be saving, or
        wait in a collective, which SIGINT does not interrupt. A second Ctrl-C stops waiting.
        """
        request = next(self._requests)
        running, done = set(ranks), dict[int, Done]()
        interrupted = False
        with _interrupts_counted() as interrupts:
            for rank in ranks:
                send(self._connections[rank], Run(request=request, name=name, code=code))
            while running and interrupts.count < 2:
                if interrupts.count and not interrupted:
                    interrupted = True
                    self._launcher.send(Interrupt())
                    view.interrupted()
                event = self._next()
                match event:
                    case Received(rank=rank, message=Done() as message):
                        if message.request == request:
                            done[rank] = message
                            running.discard(rank)
                    case _:
                        self._show(event, view)
                view.passing(done)
            self._show_late_output(done, view)
        return CellResult(done=done, interrupted=interrupts.count > 0, stuck=tuple(sorted(running)))

    def stop(self) -> None:
        """Stop the ranks, and wait until they have exited."""
        self._over = True
        self._launcher.end()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()

    # ---- events

    def _next(self) -> Event:
        try:
            return self._events.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            return Said(text="")

    def _show(self, event: Event, view: CellShown) -> None:
        match event:
            case Received(rank=rank, message=Wrote(text=text)) | Printed(rank=rank, text=text):
                view.wrote(rank, text)
            case Found(findings=findings):
                view.found(findings)
        self._note(event)

    def _note(self, event: Event) -> None:
        """Process events that concern every wait: connected and disconnected ranks."""
        match event:
            case Arrived(rank=rank, connection=connection):
                self._connections[rank] = connection
                threading.Thread(target=self._receive, args=event, daemon=True).start()
            case WorldReady(size=size):
                self.world_size = size
            case Found(findings=findings):
                # Why the ranks exit; a hang that may recover does not count.
                for finding in findings:
                    if finding.status is Status.FAILURE:
                        self._failure = finding
            case Received(rank=rank, message=None):
                self._wait_for_reason()
                raise self._ended(f"rank {rank} has exited")
            case Ended() | None:
                raise self._ended("the ranks have exited")

    def _wait_for_reason(self) -> None:
        """Wait for the launcher, which stops the other ranks, and knows the reason."""
        deadline = time.monotonic() + _VERDICT_WITHIN_S
        while time.monotonic() < deadline:
            match self._next():
                case Found() as event:
                    self._note(event)
                case Ended() | None:
                    return

    def _ended(self, what: str) -> MusterError:
        self._over = True
        fix = "%muster restart  # then rerun the cells that define what you need"
        why = f"logs: {self.run_folder.logs}"
        if self._failure is None:
            return MusterError(what, why=why, fix=fix)
        return MusterError(
            self._failure.what,
            why=f"{self._failure.why}\n{why}".strip(),
            fix=f"{self._failure.fix}\n{fix}".strip(),
        )

    def _show_late_output(self, done: dict[int, Done], view: CellShown) -> None:
        """Wait for output through the logs, which arrives shortly after the cell's end."""
        late = {rank for rank, result in done.items() if result.wrote_to_log}
        deadline = time.monotonic() + _LATE_OUTPUT_S
        while late and time.monotonic() < deadline:
            event = self._next()
            self._show(event, view)
            if isinstance(event, Printed):
                late.discard(event.rank)

    def _receive(self, rank: int, connection: Connection) -> None:
        message = receive(connection, _MESSAGE)
        while message is not None:
            self._events.put(Received(rank, message))
            message = receive(connection, _MESSAGE)
        self._events.put(Received(rank, None))


class Interrupts:
    """The number of interrupts."""

    count = 0

    def add(self, *_: object) -> None:
        """Count an interrupt; the signal handler."""
        self.count += 1


@contextlib.contextmanager
def _interrupts_counted() -> Iterator[Interrupts]:
    """Count interrupts: an exception at any line could leave ranks in different states."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():  # which alone receives signals
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.add)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
