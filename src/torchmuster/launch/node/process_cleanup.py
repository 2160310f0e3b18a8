"""Find and end every process of a run, however it was started.

On Linux a node agent adopts its descendants (``supervisor.py``), so it finds them all. Elsewhere, and for commands that
clean up after others, each process of a run has a token in its environment: the ranks, their data loaders, and processes
that a script starts, even in another session. Only a process that clears its environment has none.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable

import psutil

from torchmuster.launch.node import supervisor

TOKEN_VARIABLE = "TORCHMUSTER_RUN_TOKEN"  # noqa: S105  # a variable's name
_LOOK_AGAIN_S = 0.02


def end_attempt(token: str, *, within_s: float, keep_sessions: Collection[int] = ()) -> list[int]:
    """Kill what the ranks of an attempt have left; return the processes that are still alive after ``within_s``.

    Processes in the node agent's own session are its helpers, and those in the sessions ``keep_sessions`` belong to others.
    """
    if sys.platform != "linux":
        return [process.pid for process in kill_processes(token, within_s=within_s)]
    return supervisor.kill_descendants(within_s, {os.getsid(0), *keep_sessions})


def processes_of(
    token: str, *, owner: int | None = None, variable: str = TOKEN_VARIABLE
) -> list[psutil.Process]:
    """Return the running processes on this host that belong to a run, or to one node agent of it.

    A node agent's token is the run's token, a dot and the node index, so that two node agents on one host do
    not affect each other. A token that was read from a run folder is trusted only for processes of the folder's
    ``owner``. ``variable`` is where the token is in the environment.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = process.environ().get(variable, "")
            ours = theirs == token or theirs.startswith(f"{token}.")
            if owner is not None and process.uids().real != owner:
                continue
            if ours and process.pid != os.getpid():
                found.append(process)
    return found


def signal_processes(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that are still alive."""
    for process in processes:
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            process.send_signal(number)


def kill_processes(
    token: str, *, within_s: float, owner: int | None = None, variable: str = TOKEN_VARIABLE
) -> list[psutil.Process]:
    """Kill every process of a run; return those that are still alive after ``within_s``."""
    deadline = time.monotonic() + within_s
    while True:
        left = processes_of(token, owner=owner, variable=variable)
        signal_processes(left, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_LOOK_AGAIN_S)  # a process may have just started another
