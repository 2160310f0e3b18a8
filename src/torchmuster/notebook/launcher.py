"""The kernel's end of the launcher beside it."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from torchmuster.notebook import launcher_words as words
from torchmuster.runfolder import RunFolder

_END_WITHIN_S = 20.0
_HEARD = msgspec.json.Decoder(words.FromLauncher)


class Launcher:
    """The process that launches the ranks; ``hear`` gets what it says, and None when it has gone."""

    def __init__(self, run: RunFolder, hear: Callable[[words.FromLauncher | None], None]) -> None:
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

    def tell(self, message: words.Order | words.ToLauncher) -> None:
        """Tell it something; one that has gone is noticed by its silence."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Have it end all ranks, and wait for that."""
        self.tell(words.End())
        self.tell(words.End())  # asked twice, it waits for none of them
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:  # its keepers end the ranks when they no longer hear it
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_WITHIN_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(_HEARD.decode(line))
        self._hear(None)
