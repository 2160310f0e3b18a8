"""The kernel's side of the launcher process."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import RunFolder


class LauncherOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The job to launch, sent as the first line."""

    spec: JobSpec
    run: str


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Send SIGINT to every rank."""


class EndLauncher(msgspec.Struct, frozen=True, tag="end"):
    """Stop the ranks; the second time, kill them."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A message of the launcher itself."""

    text: str


class HostsFound(msgspec.Struct, frozen=True, tag="found"):
    """A finding of the launcher: a hang, or why the ranks exited."""

    findings: tuple[Finding, ...]


class WorldReady(msgspec.Struct, frozen=True, tag="world"):
    """The number of ranks."""

    size: int


class Printed(msgspec.Struct, frozen=True, tag="printed"):
    """Lines in a rank's log, written by libraries and programs, not by cells."""

    rank: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """All ranks have exited."""

    exit_code: int


ToLauncher = Interrupt | EndLauncher
FromLauncher = Said | HostsFound | WorldReady | Printed | Ended


_END_WITHIN_S = 20.0
_HEARD = msgspec.json.Decoder(FromLauncher)


class Launcher:
    """The process that launches the ranks.

    ``hear`` gets its messages, and None when it has exited.
    """

    def __init__(self, run: RunFolder, hear: Callable[[FromLauncher | None], None]) -> None:
        self._hear = hear
        with (run.path / "launcher.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchmuster.notebook.launcher_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Jupyter interrupts and kills a kernel's whole process group.
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._listen, name="notebook-launcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def tell(self, message: LauncherOrder | ToLauncher) -> None:
        """Send it a message; errors are ignored, as its exit is noticed by the reader."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Make it stop all ranks, and wait until it exits."""
        self.tell(EndLauncher())
        self.tell(EndLauncher())  # the second request kills the ranks
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except (
            subprocess.TimeoutExpired
        ):  # its node agents stop the ranks when its heartbeat is missing
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_WITHIN_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(_HEARD.decode(line))
        self._hear(None)
