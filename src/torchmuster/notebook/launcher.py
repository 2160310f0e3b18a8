"""The kernel's end of the launcher beside it."""

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
    """What to launch: the first line. ``guests`` are machines that join by a code."""

    spec: JobSpec
    run: str
    guests: int = 0


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Send SIGINT to every rank."""


class EndLauncher(msgspec.Struct, frozen=True, tag="end"):
    """End the ranks; a second time, at once."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What the launcher says of its own."""

    text: str


class Code(msgspec.Struct, frozen=True, tag="code"):
    """The line to paste on another machine."""

    machine: int
    line: str


class HostsFound(msgspec.Struct, frozen=True, tag="found"):
    """What the launcher found: a hang, or why the ranks ended."""

    findings: tuple[Finding, ...]


class WorldReady(msgspec.Struct, frozen=True, tag="world"):
    """How many ranks there are."""

    size: int


class Printed(msgspec.Struct, frozen=True, tag="printed"):
    """Lines that a rank wrote to its log: libraries and programs do, cells do not."""

    rank: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """None of the ranks is left."""

    exit_code: int


ToLauncher = Interrupt | EndLauncher
FromLauncher = Said | Code | HostsFound | WorldReady | Printed | Ended


_END_WITHIN_S = 20.0
_HEARD = msgspec.json.Decoder(FromLauncher)


class Launcher:
    """The process that launches the ranks; ``hear`` gets what it says, and None when it has gone."""

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
        """Whether it runs."""
        return self._process.poll() is None

    def tell(self, message: LauncherOrder | ToLauncher) -> None:
        """Tell it something; one that has gone is noticed by its silence."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Have it end all ranks, and wait for that."""
        self.tell(EndLauncher())
        self.tell(EndLauncher())  # asked twice, it waits for none of them
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except (
            subprocess.TimeoutExpired
        ):  # its node agents end the ranks when they no longer hear it
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_WITHIN_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(_HEARD.decode(line))
        self._hear(None)
