"""Loader workers stop when their rank stops them, not when all processes get SIGTERM.

torchrun and schedulers send SIGTERM to all processes of a rank. The rank then finishes its
step and saves, for which it still needs its workers.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from torchmuster.units import plural

_FIRST_TRY = 4  # workers to try first
_LOOK_EVERY_S = 5.0
_SAVED_WITHIN_S = 30.0  # how long a stopping rank needs its workers, at most


class IgnoreSignalsInWorkers:
    """A ``worker_init_fn`` for a DataLoader that then calls another one."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Prepare a worker process."""
        ignore_signals_in_workers()
        if self._then is not None:
            self._then(worker)


def ignore_signals_in_workers() -> None:
    """Make a worker exit on SIGTERM only if its rank sent it or has exited."""
    # Not the parent process, which differs under forkserver.
    rank = multiprocessing.parent_process()
    if rank is None or not hasattr(signal, "sigtimedwait"):  # only Linux reports the sender
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A library may have started a thread before; the sender of its signals is unknown.
    signal.signal(signal.SIGTERM, _end_later)
    # Blocked in all other threads, so that the waiting thread gets it.
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
            os._exit(0)  # as torch's own handler does, so that it does not count as a failure


def advise_workers(*, workers: int, cores: int, ranks: int) -> str:
    """Return the number of workers to try for slow data; ``cores`` are shared by ``ranks``."""
    workers_per_rank = max(1, cores // ranks)
    shared = f"{plural(cores, 'core')} / {plural(ranks, 'rank')}"
    if workers < workers_per_rank:
        next_try = min(workers_per_rank, max(2 * workers, _FIRST_TRY))
        return f"workers {workers} -> try {next_try} ({shared})"
    return (
        f"{workers} worker{'s' if workers > 1 else ''} already use all cores ({shared}): make a "
        "sample cheaper to read (decode, resize and tokenize once, beforehand), or read from a faster disk"
    )
