"""Interleave the samples of two measuring processes, so that disturbances of the host affect both.

A shared host is 10 to 30 % slower for seconds or minutes at a time. Consecutive processes show that
as a difference between them; samples that are milliseconds apart do not. Each side has a socket in
the referee's folder, passed to its processes in :data:`VARIABLE`. A process requests its turn
there, and returns it after each sample.
"""

import os
import random
import socket
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from torchmuster.errors import Impossible

VARIABLE = "MUSTER_TURNS"
SIDES = ("before", "after")
PAIRS = 16  # of fresh processes: enough for up to 19 series, even if one pair was disturbed
_WANT, _GO, _DONE = b"want\n", b"go\n", b"done\n"
_ANY_CORE = -1


def interleaved_pair_id() -> str:
    """Return the common id of the two records of a pair.

    Empty if this process is not interleaved.
    """
    path = os.environ.get(VARIABLE, "")
    return Path(path).parent.name if path else ""


class Turns:
    """This process's turns, as a context around each sample.

    Without another side, it never waits.
    """

    def __init__(self, *, asks: bool = True) -> None:
        """Connect to the referee named in the environment, if any.

        One of the ranks ``asks`` for all.
        """
        path = os.environ.get(VARIABLE) if asks else None
        self._stream = None
        self._cores: set[int] | None = None  # the cores of this thread if it was pinned
        if path:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(path)
            self._stream = self._socket.makefile("rwb", buffering=0)
            self._core = int(self._stream.readline())

    def stay_on_one_core(self) -> None:
        """Pin this thread to the core of the other side, so that both see the same neighbours."""
        if self._stream is not None and self._core != _ANY_CORE:
            self._cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self._core})

    def __enter__(self) -> Self:
        self._tell(_WANT)
        if self._stream is not None and self._stream.readline() != _GO:
            raise ConnectionError("the referee of the interleaved run has exited")
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(_DONE)

    def _tell(self, word: bytes) -> None:
        if self._stream is not None:
            self._stream.write(word)

    def close(self) -> None:
        """Take no more turns."""
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
        if self._stream is not None:
            self._stream.close()
            self._socket.close()


class Referee:
    """Gives turns to two sides: one sample of each per round, in random order.

    No side gets a turn before both request one, so both have warmed up. A side that has exited is
    not waited for.
    """

    def __init__(self, seed: int = 0) -> None:
        """Start without a turn; ``seed`` decides the order and the core."""
        if not hasattr(socket, "AF_UNIX"):
            raise Impossible(
                "cannot interleave measurements",
                why="this system has no Unix sockets",
                fix="measure on Linux or macOS",
            )
        self._draw = random.Random(seed)
        self._changed = threading.Condition()
        self._first = self._draw.choice(SIDES)
        self._wants: set[str] = set()  # a turn
        self._been: set[str] = set()  # in this round
        self._ended: set[str] = set()
        self._busy = False
        self._over = False
        self._core = _ANY_CORE
        if hasattr(os, "sched_getaffinity"):
            self._core = self._draw.choice(sorted(os.sched_getaffinity(0)))
        self.taken = dict.fromkeys(SIDES, 0)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-turns-"))
        )
        self.paths = {side: folder / side for side in SIDES}
        for side, path in self.paths.items():
            listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen()
            thread = threading.Thread(target=self._serve, args=(side, listener), daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(_wake, path)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for side in SIDES:
            self.has_ended(side)
        self._stack.close()

    def has_ended(self, side: str) -> None:
        """Note that a side's process has exited: the other side does not wait for it."""
        with self._changed:
            self._ended.add(side)
            self._end_round()
            self._changed.notify_all()

    def _serve(self, side: str, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if self._over:
                connection.close()
                return
            with connection, suppress(OSError), connection.makefile("rwb", buffering=0) as stream:
                stream.write(b"%d\n" % self._core)
                while stream.readline() == _WANT:
                    self._await_turn(side)
                    try:
                        stream.write(_GO)
                        stream.readline()  # done, or nothing if it died
                    finally:
                        self._end_turn(side)

    def _await_turn(self, side: str) -> None:
        with self._changed:
            self._wants.add(side)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_go(side))
            self._wants.discard(side)
            self._busy = True

    def _may_go(self, side: str) -> bool:
        (other,) = set(SIDES) - {side}
        if self._busy or side in self._been:
            return False
        if other in self._been | self._ended:
            return True
        return side == self._first and other in self._wants

    def _end_turn(self, side: str) -> None:
        with self._changed:
            self._busy = False
            self.taken[side] += 1
            self._been.add(side)
            self._end_round()
            self._changed.notify_all()

    def _end_round(self) -> None:
        if self._been | self._ended >= set(SIDES):
            self._been.clear()
            self._first = self._draw.choice(SIDES)


def _wake(path: Path) -> None:
    """Wake up the waiting thread, so that it checks whether the run is over."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
