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
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# In the environment of a node agent and of all that it starts.
SUPERVISOR_VARIABLE = "TORCHMUSTER_SUPERVISOR"
FOLDER_VARIABLE = "TORCHMUSTER_NODE_FOLDER"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.02
_FOLDER_PREFIX = "torchmuster-node-"
# A folder that is younger may not be locked yet.
_OLD_S = 60.0
_FORWARDED = ("SIGTERM", "SIGHUP")
_LEFT_TO_THE_AGENT = ("SIGINT", "SIGUSR1", "SIGUSR2")


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends (Linux; elsewhere others clean up)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(137)


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


def kill_descendants(within_s: float) -> bool:
    """Kill everything below this process, again and again until nothing is left; return whether that succeeded."""
    deadline_s = time.monotonic() + within_s
    while left := descendants(os.getpid()):
        if time.monotonic() > deadline_s:
            return False
        for process in left:
            if process.state != "Z":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_LOOK_AGAIN_S)
    return True


class NodeFolder:
    """The temporary folder of a node agent; it is removed with its supervisor.

    It is locked while the supervisor lives. If that was killed, the next supervisor of the same user removes the folder.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        self._lock = _lock(self.path)

    def remove(self) -> None:
        """Remove the folder and its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """Lock a folder until the returned file is closed; ``None`` on systems without locks. Raises ``OSError`` if it is in use."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or of another user
            found = folder.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_own and time.time() - found.st_mtime > _OLD_S:
                file = _lock(folder)
                if file is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(file)


def supervise(command: Sequence[str]) -> int:
    """Run a node agent; return its exit code when nothing that it started is alive."""
    adopt_orphans()
    folder = NodeFolder()
    mark = _new_mark()
    environment = {**os.environ, SUPERVISOR_VARIABLE: mark, FOLDER_VARIABLE: str(folder.path)}
    agent = subprocess.Popen(command, env=environment)
    _pass_signals_on(agent.send_signal)
    code = agent.wait()
    return _clean_up(code, mark, folder)


def continue_supervised() -> None:
    """Go on in a child process, as a node agent; this process supervises it, and exits with its exit code.

    For commands that are node agents themselves, before they start threads or an event loop.
    """
    if not hasattr(os, "fork"):  # Windows: nobody supervises
        return
    sys.stdout.flush()
    sys.stderr.flush()
    folder = NodeFolder()
    os.environ[SUPERVISOR_VARIABLE] = _new_mark()
    os.environ[FOLDER_VARIABLE] = str(folder.path)
    adopt_orphans()
    agent = os.fork()
    if agent == 0:
        serve_below()
        return
    _pass_signals_on(lambda number: os.kill(agent, number))
    _, status = os.waitpid(agent, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(_clean_up(code, os.environ[SUPERVISOR_VARIABLE], folder))


def _new_mark() -> str:
    """Return the value by which a node agent knows its supervisor, and others find its processes."""
    return f"{os.getpid()}.{secrets.token_hex(8)}"


def _pass_signals_on(send: Callable[[int], None]) -> None:
    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            send(number)

    # A terminal and Slurm send the others to every process; the node agent decides. Not SIG_IGN, which children inherit.
    handlers = dict.fromkeys(_FORWARDED, forward) | dict.fromkeys(_LEFT_TO_THE_AGENT, _nothing)
    for name, handler in handlers.items():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _nothing(_: int, __: object) -> None:
    """Do nothing at a signal."""


def _clean_up(code: int, mark: str, folder: NodeFolder) -> int:
    """Kill what a node agent has left; return its exit code as shells show it."""
    if sys.platform == "linux":
        kill_descendants(_KILL_WITHIN_S)
    else:
        _kill_marked(mark)
    folder.remove()
    return code if code >= 0 else 128 - code


def _kill_marked(mark: str) -> None:
    """Kill the processes that have this supervisor's mark in their environment."""
    import psutil

    deadline_s = time.monotonic() + _KILL_WITHIN_S
    while time.monotonic() < deadline_s:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    process.environ().get(SUPERVISOR_VARIABLE) == mark
                    and process.pid != os.getpid()
                ):
                    left.append(process)
                    process.kill()
        if not left:
            return
        time.sleep(_LOOK_AGAIN_S)


if __name__ == "__main__":
    sys.exit(supervise([sys.executable, "-m", "torchmuster.launch.node", *sys.argv[1:]]))
