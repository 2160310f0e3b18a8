"""Find and kill every process of a run, however it was started.

Each process of a run inherits a token in its environment: the agent, the ranks, their data loaders, and
processes that a script starts, even in another session. Only a process that clears its environment cannot be
found.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

TOKEN_VARIABLE = "TORCHMUSTER_RUN_TOKEN"  # noqa: S105  # a variable's name
# How long ranks that are asked to stop may take; torch's elastic agent reads this variable too.
GRACE_VARIABLE, USUAL_GRACE_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"
_LOOK_AGAIN_S = 0.02


def processes_of(token: str, *, owner: int | None = None) -> list[psutil.Process]:
    """Return the running processes on this host that belong to a run, or to one node agent of it.

    A node agent's token is the run's token, a dot and the node index, so that two node agents on one host do
    not affect each other. A token that was read from a run folder is trusted only for processes of the folder's
    ``owner``.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = process.environ().get(TOKEN_VARIABLE, "")
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
    token: str, *, within_s: float, spare: int | None = None, owner: int | None = None
) -> list[psutil.Process]:
    """Kill every process of a run except ``spare``; return those that are still alive after ``within_s``."""
    deadline = time.monotonic() + within_s
    while True:
        left = [process for process in processes_of(token, owner=owner) if process.pid != spare]
        signal_processes(left, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_LOOK_AGAIN_S)  # a process may have just started another
