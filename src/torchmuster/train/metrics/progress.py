"""Where a run's lines go: the terminal with a bar below them, or plain lines."""

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torchmuster.runfolder import NO_ROOM

_REDRAW_EVERY_S = 0.5


class Screen(Protocol):
    """Shows lines, and how far a run is."""

    def say(self, line: str) -> None:
        """Show a line."""
        ...

    def move(self, step: int) -> None:
        """Show how far the run is; called at every step, so it must cost next to nothing."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Silence:
    """Shows nothing: on all ranks but the first, and where nobody wants to read."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def move(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines(Silence):
    """Prints lines, at once: what a log file or another program reads."""

    def say(self, line: str) -> None:
        """Print a line; where it finds no room on a disk, the training goes on without."""
        try:
            print(line, flush=True)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise


class Bar:
    """Lines with a progress bar below them; drawn by the training thread itself, twice a second at most."""

    def __init__(self, last_step: int | None, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # a thread that draws would take time from the training
            transient=True,
        )
        self._task = self._progress.add_task("", total=last_step)
        self._progress.start()
        self._redraw_at = 0.0

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def move(self, step: int) -> None:
        """Redraw the bar if it is time."""
        now = time.perf_counter()
        if now >= self._redraw_at:
            self._progress.update(self._task, completed=step, refresh=True)
            self._redraw_at = now + _REDRAW_EVERY_S

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def screen(last_step: int | None) -> Screen:
    """Return a bar on a terminal, plain lines elsewhere."""
    return Bar(last_step) if sys.stdout.isatty() else Lines()
