"""The process that kills a node agent's processes if the node agent itself is killed.

It runs in its own session, so that neither Ctrl-C nor the end of an ssh session reaches it, and waits for its
standard input to close. If the node agent sent ``done`` first, there is nothing to do. If the reaper is
killed, the node agent starts another.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from torchmuster.launch.node import process_cleanup
from torchmuster.launch.node.agent_folder import hold_agent_folder

_DONE = b"done\n"
_KILL_WITHIN_S = 10.0
_GO_WITHIN_S = 2.0


class Reaper:
    """The node agent's handle of the reaper process."""

    def __init__(self, token: str, folder: Path) -> None:
        self._told = f"{token}\n{folder}\n".encode()
        self._process = self._start()

    def see_to_it(self) -> None:
        """Start another reaper if it was killed."""
        if self._process.poll() is not None:
            self._process = self._start()

    def dismiss(self) -> None:
        """Stop the reaper, because no process is left to kill."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(_DONE)
            self._process.stdin.close()
        try:
            self._process.wait(_GO_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "torchmuster.launch.node.reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # killed at once: the next check restarts it
            process.stdin.write(self._told)
        return process


def main() -> None:
    """Wait until the node agent exits; without ``done``, kill its processes and remove its folder."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        with contextlib.suppress(AttributeError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    token, folder = (sys.stdin.buffer.readline().decode().rstrip("\n") for _ in range(2))
    with contextlib.suppress(OSError):  # the node agent has removed it
        hold_agent_folder(Path(folder))
    if token and sys.stdin.buffer.read() != _DONE:
        process_cleanup.kill_processes(token, within_s=_KILL_WITHIN_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
