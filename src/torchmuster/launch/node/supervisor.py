"""The parent of a node agent: when the node agent ends, nothing that it started stays alive.

It takes the arguments of the node agent, and uses only the standard library, so that it starts at once and takes little
memory. On Linux it is a *subreaper* (``prctl(2)``): processes whose parents have ended become its children, whatever
their session or environment, so that it finds every descendant. Elsewhere it finds the processes of its node agent by a
token in their environment. If the supervisor itself is killed, the kernel kills the node agent, and with it the ranks.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from torchmuster.launch.rank.start import die_with

# In the environment of a node agent and of all that it starts.
SUPERVISOR_VARIABLE = "TORCHMUSTER_SUPERVISOR"
FOLDER_VARIABLE = "TORCHMUSTER_NODE_FOLDER"
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.02
FOLDER_PREFIX = "torchmuster-node-"  # of the temporary folder of a node agent
_FORWARDED = ("SIGTERM", "SIGHUP")
_LEFT_TO_THE_AGENT = ("SIGINT", "SIGUSR1", "SIGUSR2")


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def serve_below() -> None:
    """Prepare this process, a node agent: it ends with its supervisor, and finds all that it starts."""
    mark = os.environ.get(SUPERVISOR_VARIABLE, "")
    if mark:
        die_with(int(mark.partition(".")[0]))
    if sys.platform == "linux":  # elsewhere all processes keep the mark
        os.environ.pop(SUPERVISOR_VARIABLE, None)
        adopt_orphans()


class Process:
    """A process as ``/proc/PID/stat`` shows it."""

    def __init__(self, pid: int, state: str, parent: int, session: int) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.session = session


def descendants(root: int) -> list[Process]:
    """Return all processes below ``root`` (Linux), those that have exited and wait for their parent included."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it ended meanwhile
            continue
        # The name before the last bracket may contain anything.
        state, parent, _, session = text.rpartition(")")[2].split()[:4]
        process = Process(int(folder.name), state, int(parent), int(session))
        children.setdefault(process.parent, []).append(process)
    below: list[Process] = []
    parents = [root]
    while parents:
        found = children.get(parents.pop(), [])
        below += found
        parents += [process.pid for process in found]
    return below


def kill_descendants(within_s: float, keep_sessions: Collection[int] = ()) -> list[int]:
    """Kill everything below this process, again and again until nothing is left; return what is alive after ``within_s``.

    Processes in the sessions ``keep_sessions`` belong to others.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        found = descendants(os.getpid())
        left = [each for each in found if each.session not in keep_sessions and each.state != "Z"]
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline_s:
            reap_orphans()
            return [process.pid for process in left]
        time.sleep(_LOOK_AGAIN_S)


def reap_orphans() -> None:
    """Collect the exit codes of adopted processes (Linux). What this process starts
    leads a session or is in its own, and is not touched.
    """
    if sys.platform != "linux":
        return
    for process in descendants(os.getpid()):
        is_own_zombie = process.state == "Z" and process.parent == os.getpid()
        if is_own_zombie and process.session not in (process.pid, os.getsid(0)):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def supervise(command: Sequence[str]) -> int:
    """Run a node agent; return its exit code when nothing that it started is alive."""
    adopt_orphans()
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    mark = f"{os.getpid()}.{secrets.token_hex(8)}"
    environment = {**os.environ, SUPERVISOR_VARIABLE: mark, FOLDER_VARIABLE: folder}
    agent = subprocess.Popen(command, env=environment)
    _pass_signals_on(agent)
    code = agent.wait()
    if sys.platform == "linux":
        kill_descendants(_KILL_WITHIN_S)
    else:
        from torchmuster.launch.node import process_cleanup

        process_cleanup.kill_processes(mark, within_s=_KILL_WITHIN_S, variable=SUPERVISOR_VARIABLE)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code  # as shells show it


def continue_supervised() -> None:
    """Go on as a node agent: in a child of this process, which supervises it and exits with its exit code.

    For commands of ``muster`` that are node agents themselves, before they read their input: the child runs the same command.
    """
    mark = os.environ.get(SUPERVISOR_VARIABLE, "")
    if mark.partition(".")[0] == str(os.getppid()):
        serve_below()
    else:
        sys.exit(supervise([sys.executable, "-m", "torchmuster", *sys.argv[1:]]))


def _pass_signals_on(agent: subprocess.Popen[bytes]) -> None:
    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            agent.send_signal(number)

    # A terminal and Slurm send the others to every process; the node agent decides. Not SIG_IGN, which children inherit.
    handlers = dict.fromkeys(_FORWARDED, forward) | dict.fromkeys(_LEFT_TO_THE_AGENT, _nothing)
    for name, handler in handlers.items():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _nothing(_: int, __: object) -> None:
    """Do nothing at a signal."""


if __name__ == "__main__":
    sys.exit(supervise([sys.executable, "-m", "torchmuster.launch.node", *sys.argv[1:]]))
