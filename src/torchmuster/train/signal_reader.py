"""Signals as a thread reads them, and not the processes that are forked meanwhile."""

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

_LAST = 0  # no signal has this number


class SignalReader:
    """Reads signals by a thread: Python's own handlers do not run while a collective is waited for."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._former: dict[int, Any] = {}
        for name in names:
            number = getattr(signal, name, None)  # not every system has them all
            if number is not None:
                self._former[number] = signal.signal(number, lambda *_: None)
        self._former_descriptor = signal.set_wakeup_fd(
            self._theirs.fileno(), warn_on_full_buffer=False
        )
        _open.append(self)
        _watch_forks()

    @property
    def numbers(self) -> list[int]:
        """The signals that it reads."""
        return list(self._former)

    def read(self, hear: Any) -> None:
        """Call ``hear`` with the name of each signal until it is closed."""
        with self._ours:
            while numbers := self._ours.recv(64):
                for number in numbers:
                    if number == _LAST:
                        return
                    if number in self._former:
                        hear(signal.Signals(number).name)

    def close(self) -> None:
        """Put everything back as it was."""
        self.put_back()
        self._theirs.send(bytes([_LAST]))  # a forked process may keep its end open
        self._theirs.close()
        _open.remove(self)

    def put_back(self) -> None:
        """Let signals do again what they did before."""
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            signal.signal(number, handler)


# Those whose signals a forked process (a loader's worker) must not take for its own.
_open: list[SignalReader] = []
_masks: list[set[Any]] = []  # of who is forking
_forks_watched = False


def _watch_forks() -> None:
    global _forks_watched
    if not _forks_watched and hasattr(os, "register_at_fork"):
        _forks_watched = True
        os.register_at_fork(
            before=_hold_back, after_in_parent=_let_through, after_in_child=_be_another
        )


def _hold_back() -> None:
    """Let no signal come before the new process is itself: it would be taken for one to this process."""
    if _open:
        numbers = [number for one in _open for number in one.numbers]
        _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))


def _let_through() -> None:
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _be_another() -> None:
    while _open:
        _open.pop().put_back()
    _let_through()
