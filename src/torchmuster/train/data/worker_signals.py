"""Processes that read for a rank end when their rank ends them, and not when everybody is asked to end.

torchrun and schedulers send SIGTERM to all processes of a rank. The rank then trains to the end of its
step and saves, for which its readers must go on.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess

_LOOK_EVERY_S = 5.0
_SAVED_WITHIN_S = 30.0  # what a rank that was asked to end needs its readers for, at most


class HeedingOnlyTheRank:
    """A ``worker_init_fn`` for a DataLoader, which then calls another one."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Prepare a worker process."""
        heed_only_the_rank()
        if self._then is not None:
            self._then(worker)


def heed_only_the_rank() -> None:
    """Make a worker process end by SIGTERM only if its rank sent it, or has gone; the rest is the rank's."""
    # Not the process above it, which under forkserver is another one.
    rank = multiprocessing.parent_process()
    if rank is None or not hasattr(signal, "sigtimedwait"):  # Linux alone tells who sent a signal
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A library may have made a thread before; what that one gets, nobody knows the sender of.
    signal.signal(signal.SIGTERM, _end_later)
    # Held back in all other threads, so that the one that waits for it gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_later(*_: object) -> None:
    timer = threading.Timer(_SAVED_WITHIN_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end_with(rank: BaseProcess) -> None:
    while True:
        heard = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S)
        if (heard is not None and heard.si_pid == rank.pid) or not rank.is_alive():
            os._exit(0)  # as torch's own handler does, so that nobody takes it for a failure
