"""The process that ends what a node agent started, should the node agent itself be killed.

It sits in a session of its own, so that neither Ctrl-C nor the end of an ssh session reaches it, and
waits for the other end of its standard input to close. Where the node agent said ``done`` first, there is
nothing to do. Should the reaper be killed, the node agent starts another.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from torchmuster.launch.node import process_cleanup

_DONE = b"done\n"
_KILL_WITHIN_S = 10.0
_GO_WITHIN_S = 2.0


class Reaper:
    """The node agent's hold on it."""

    def __init__(self, token: str, folder: Path) -> None:
        self._told = f"{token}\n{folder}\n".encode()
        self._process = self._start()

    def see_to_it(self) -> None:
        """Start another if it was killed."""
        if self._process.poll() is not None:
            self._process = self._start()

    def dismiss(self) -> None:
        """Nothing is left to be ended: it goes before the node agent does."""
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
        with contextlib.suppress(OSError):  # killed at once: the next look finds that
            process.stdin.write(self._told)
        return process


def main() -> None:
    """Wait for the node agent's end; unless it was done, kill what it left and remove its folder."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        with contextlib.suppress(AttributeError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    token, folder = (sys.stdin.buffer.readline().decode().rstrip("\n") for _ in range(2))
    if token and sys.stdin.buffer.read() != _DONE:
        process_cleanup.kill_processes(token, within_s=_KILL_WITHIN_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
