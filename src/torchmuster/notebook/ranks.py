"""The ranks of a notebook from the kernel's side: start, run cells, interrupt, stop.

All events arrive in one queue, from a thread for each rank and one for the launcher; the kernel's
main thread reads it and can be interrupted with Ctrl-C.
"""

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from torchmuster.errors import MusterError
from torchmuster.notebook.launcher import Launcher
from torchmuster.notebook.listener import RankListener
from torchmuster.notebook.messages import (
    Done,
    FromRank,
    Hello,
    Run,
    Wrote,
    new_secret,
    receive,
    send,
)
from torchmuster.notebook.shown import CellShown
from torchmuster.runfolder import DEFAULT_ROOT, RunFolder

_LOOK_EVERY_S = 0.1
# Of the launcher's progress, such as how long there was no output; the line below a cell tells more.
_PROGRESS = "muster: "
_REASON_WITHIN_S = 10.0
_MESSAGE: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class Arrived(NamedTuple):
    """A rank has connected."""

    hello: Hello
    connection: Connection


class Received(NamedTuple):
    """A message of a rank; None: it has disconnected."""

    rank: int
    message: FromRank | None


Event = Arrived | Received | str | None  # a line of the launcher; None: it has exited


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The results of the ranks that returned; ``stuck`` did not return before the second interrupt."""

    done: dict[int, Done]
    interrupted: bool = False
    stuck: tuple[int, ...] = ()


class Ranks:
    """Started by the constructor, usable after :meth:`wait_until_ready`, stopped by :meth:`stop`."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.flags = flags  # of muster run
        self.world_size = 0
        self.run_folder = RunFolder(DEFAULT_ROOT)  # until the first rank has named it
        self._over = False
        self._requests = itertools.count()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._texts: list[str] = []  # of the launcher, since the last cell
        secret = new_secret()
        self._listener = RankListener(secret, lambda *rank: self._events.put(Arrived(*rank)))
        self._launcher = Launcher(flags, self._listener.address, secret, self._events.put)

    @property
    def alive(self) -> bool:
        """Whether cells can be run."""
        return not self._over and self._launcher.alive

    def wait_until_ready(self, show: Callable[[str], None]) -> None:
        """Wait for all ranks, then stop listening; on failure, clean up everything. ``show`` gets the launcher's lines."""
        try:
            while not self.world_size or len(self._connections) < self.world_size:
                event = self._events.get()
                self._note(event)
                if isinstance(event, str):
                    show(event)
        except BaseException:
            self.stop()
            raise
        self._listener.close()
        self._texts.clear()

    def catch_up(self) -> None:
        """Process the events since the last cell; raise the reason if the ranks have exited."""
        for _ in range(self._events.qsize()):
            event = self._events.get()
            if isinstance(event, Received) and isinstance(event.message, Wrote):
                self._events.put(event)  # shown with the next cell
            else:
                self._note(event)

    def run(self, code: str, name: str, ranks: Collection[int], view: CellShown) -> CellResult:
        """Run a cell on some ranks, and wait for all of them.

        Ctrl-C interrupts them, and the cell ends when they have returned: a rank may be saving, or
        wait in a collective, which SIGINT does not interrupt. A second Ctrl-C stops waiting.
        """
        request = next(self._requests)
        running, done = set(ranks), dict[int, Done]()
        interrupted = False
        for text in self._texts:
            self._show_text(text, view)
        self._texts.clear()
        with _interrupts_collected() as interrupts:
            for rank in ranks:
                send(self._connections[rank], Run(request=request, name=name, code=code))
            while running and len(interrupts) < 2:
                if interrupts and not interrupted:
                    interrupted = True
                    view.interrupted()
                    for rank in running:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(self._pids[rank], signal.SIGINT)
                event = self._next()
                match event:
                    case Received(rank=rank, message=Done() as message):
                        if message.request == request:
                            done[rank] = message
                            running.discard(rank)
                    case _:
                        self._show(event, view)
                view.passing(done)
        self._texts.clear()
        return CellResult(done=done, interrupted=bool(interrupts), stuck=tuple(sorted(running)))

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
            return ""

    def _show(self, event: Event, view: CellShown) -> None:
        match event:
            case Received(rank=rank, message=Wrote(text=text)):
                view.wrote(rank, text)
            case str():
                self._show_text(event, view)
        self._note(event)

    def _show_text(self, text: str, view: CellShown) -> None:
        if text and not text.startswith(_PROGRESS):
            view.printed(text)

    def _note(self, event: Event) -> None:
        """Process events that concern every wait: connected and disconnected ranks."""
        match event:
            case Arrived(hello=hello, connection=connection):
                self.world_size = hello.world_size
                self.run_folder = RunFolder(DEFAULT_ROOT.resolve() / hello.run)
                self._connections[hello.rank] = connection
                self._pids[hello.rank] = hello.pid
                arguments = (hello.rank, connection)
                threading.Thread(target=self._receive, args=arguments, daemon=True).start()
            case str():
                self._texts.append(event)
            case Received(rank=rank, message=None):
                raise self._ended(f"rank {rank} has exited")
            case None:
                raise self._ended("the ranks have exited")

    def _ended(self, what: str) -> MusterError:
        """Return the error, after waiting for the launcher, which stops the other ranks, and knows the reason."""
        self._over = True
        deadline = time.monotonic() + _REASON_WITHIN_S
        while self._launcher.alive and time.monotonic() < deadline:
            event = self._next()
            if isinstance(event, str):
                self._texts.append(event)
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, str):
                self._texts.append(event)
        return MusterError(
            what,
            why="".join(self._texts).strip(),
            fix="%muster restart  # then rerun the cells that define what you need",
        )

    def _receive(self, rank: int, connection: Connection) -> None:
        message = receive(connection, _MESSAGE)
        while message is not None:
            self._events.put(Received(rank, message))
            message = receive(connection, _MESSAGE)
        self._events.put(Received(rank, None))


@contextlib.contextmanager
def _interrupts_collected() -> Iterator[list[int]]:
    """Collect interrupts: an exception at any line could leave ranks in different states."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone receives signals
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
