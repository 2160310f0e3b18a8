"""The kernel's side of the launcher process."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe

import msgspec

from torchmuster.launch.job import JobSpec
from torchmuster.notebook.messages import (
    EndLauncher,
    FromLauncher,
    Launch,
    ToLauncher,
    receive,
    send,
)
from torchmuster.runfolder import RunFolder

_END_WITHIN_S = 20.0
_MESSAGE = msgspec.msgpack.Decoder(FromLauncher)


class Launcher:
    """The process that launches the ranks of a job.

    ``on_message`` gets its messages in a thread, and None when it has exited.
    """

    def __init__(
        self, spec: JobSpec, run: RunFolder, on_message: Callable[[FromLauncher | None], None]
    ) -> None:
        self._on_message = on_message
        self._connection, theirs = Pipe()
        with (run.path / "launcher.log").open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torchmuster.notebook.launcher_process",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Jupyter interrupts and kills a kernel's whole process group.
                start_new_session=True,
            )
        self.send(Launch(spec=spec, run=str(run.path.resolve())))
        self._thread = threading.Thread(target=self._receive, name="notebook-launcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def send(self, message: ToLauncher) -> None:
        """Send it a message; its exit is noticed by the receiver."""
        send(self._connection, message)

    def end(self) -> None:
        """Make it stop all ranks, and wait until it exits."""
        self.send(EndLauncher())
        self.send(EndLauncher())  # the second request kills the ranks
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            # The node agents stop the ranks when nothing comes from it any more.
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_WITHIN_S)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _receive(self) -> None:
        message = receive(self._connection, _MESSAGE)
        while message is not None:
            self._on_message(message)
            message = receive(self._connection, _MESSAGE)
        self._process.wait()  # leave no zombie in the kernel
        self._on_message(None)
