"""Report a run on rank 0: lines, progress bar, files and callbacks; other ranks report nothing."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torchmuster import untrusted
from torchmuster.runfolder import NO_ROOM, write_atomically
from torchmuster.train.metrics.step_line import StepRecord, render_step_line
from torchmuster.train.metrics.step_metrics import PendingRecord, StepMetrics
from torchmuster.train.world import World
from torchmuster.units import format_seconds

_STEPS, _EVALUATIONS, _SAVES = "steps.jsonl", "evaluations.jsonl", "saves.jsonl"
# Lines kept in memory while the disk is full: tens of thousands. Later ones are dropped.
_MOST_WAITING_BYTES = 16 * 2**20


class MetricsFile:
    """Writes records into a folder's ``metrics``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "metrics"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, _Growing] = {}

    def write_step(self, record: StepRecord) -> str:
        """Add one line about steps; return a message about the disk, if there is one."""
        return self._write(_STEPS, record.as_json())

    def write_evaluation(self, step: int, epoch: int, numbers: Mapping[str, float]) -> str:
        """Add one line about an evaluation; return a message about the disk, if there is one."""
        return self._write(_EVALUATIONS, {"step": step, "epoch": epoch, **numbers})

    def begin_saves(self) -> None:
        """Create the file of saves: from now on, saves are expected."""
        with contextlib.suppress(OSError):
            (self._folder / _SAVES).touch()

    def write_save(self, save: Mapping[str, Any]) -> str:
        """Add one line about a save; return a message about the disk, if there is one."""
        return self._write(_SAVES, save)

    def cut_off_after(self, step: int, *, evaluated: int) -> None:
        """Delete all lines about later steps, and a partial line left by a killed process.

        Evaluations have a separate limit: the evaluation after a step may follow the step's save.
        """
        self.close()
        for name, last in ((_STEPS, step), (_EVALUATIONS, evaluated)):
            path = self._folder / name
            if not path.exists():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            kept = [line for line in text.splitlines(keepends=True) if _is_up_to(line, last)]
            if len(whole := "".join(kept)) != len(text):
                write_atomically(path, whole)

    def _write(self, name: str, line: Mapping[str, Any]) -> str:
        if name not in self._files:
            self._files[name] = _Growing(self._folder / name)
        # JSON has no NaN or Inf; they become null.
        content = msgspec.json.encode({**line, "at_unix_s": round(time.time(), 3)})
        return self._files[name].add(content + b"\n")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _Growing:
    """An append-only file of lines; lines that do not fit on the disk wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._waiting = bytearray()
        self._full_since_s: float | None = None
        self._lost = 0

    def add(self, line: bytes) -> str:
        if len(self._waiting) + len(line) > _MOST_WAITING_BYTES:
            self._lost += 1
        else:
            self._waiting += line
        try:
            self._write_waiting()
        except OSError as error:
            if self._full_since_s is not None:
                return ""
            self._full_since_s = time.monotonic()
            return (
                f"cannot write {self._path} ({error.strerror}): training continues, and the lines "
                "are kept in memory until the file can be written"
            )
        if self._full_since_s is None:
            return ""
        took = format_seconds(time.monotonic() - self._full_since_s)
        lost = f"{self._lost} lines were lost" if self._lost else "no lines were lost"
        self._full_since_s, self._lost = None, 0
        return f"{self._path} can be written again after {took}: {lost}"

    def _write_waiting(self) -> None:
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)
        while self._waiting:  # a nearly full disk may take only a part of a line
            del self._waiting[: os.write(self._file, self._waiting)]

    def close(self) -> None:
        if self._waiting:
            with contextlib.suppress(OSError):
                self._write_waiting()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is_up_to(line: str, step: int) -> bool:
    """Return whether a line is complete and not about a later step."""
    try:
        return line.endswith("\n") and int(untrusted.parse_json(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


_REDRAW_EVERY_S = 0.5


class Screen(Protocol):
    """Shows lines and progress."""

    def say(self, line: str) -> None:
        """Show a line."""
        ...

    def move(self, step: int) -> None:
        """Show the progress of the run; called at every step, so it must be cheap."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


class NoScreen:
    """Shows nothing: on all ranks except rank 0, and in quiet mode."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def move(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines(NoScreen):
    """Prints lines without buffering, for log files and other programs."""

    def say(self, line: str) -> None:
        """Print a line; if the disk is full, training continues without it."""
        try:
            print(line, flush=True)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise


class Bar:
    """Lines with a progress bar below; the training thread draws it, at most twice a second."""

    def __init__(self, last_step: int | None, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # a drawing thread would slow down training
            transient=True,
        )
        self._task = self._progress.add_task("", total=last_step)
        self._progress.start()
        self._redraw_at = 0.0

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def move(self, step: int) -> None:
        """Redraw the bar if due."""
        now = time.perf_counter()
        if now >= self._redraw_at:
            self._progress.update(self._task, completed=step, refresh=True)
            self._redraw_at = now + _REDRAW_EVERY_S

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def screen_for(last_step: int | None) -> Screen:
    """Return a bar on a terminal, plain lines elsewhere."""
    return Bar(last_step) if sys.stdout.isatty() else Lines()


_SILENT_AT_MOST_S = 10.0


class Reports:
    """Decides when the next line is due, and sends lines to the screen, files and callbacks."""

    def __init__(
        self,
        world: World,
        *,
        folder: Path | None = None,
        log_every: int = 50,
        quiet: bool = False,
        on_record: Sequence[Callable[[StepRecord], None]] = (),
        also_at: int | None = None,
    ) -> None:
        """Report every ``log_every`` steps, and at least every 10 seconds.

        ``folder`` gets ``metrics/steps.jsonl``; ``on_record`` functions are called on rank 0 with each record.
        ``also_at`` is a step after which a line is always reported.
        """
        self._speaks = world.is_first and not quiet
        self._log_every = log_every
        self._also_at = also_at
        self._files = MetricsFile(folder) if folder is not None and world.is_first else None
        self._listeners = tuple(on_record) if world.is_first else ()
        self._last_step: int | None = None
        self._advised: set[str] = set()
        self.screen: Screen = self._plain()

    def _plain(self) -> Screen:
        """Return the screen for texts before and after the run."""
        return Lines() if self._speaks else NoScreen()

    def open(self, last_step: int | None) -> None:
        """Start reporting; ``last_step`` is the last step of the run, if known."""
        self._last_step = last_step
        if self._speaks:
            self.screen = screen_for(last_step)

    def go_on_from(self, step: int, *, evaluated: int) -> None:
        """Delete the lines after a step, and later evaluations: these steps are repeated."""
        if self._files is not None:
            self._files.cut_off_after(step, evaluated=evaluated)

    def say(self, text: str) -> None:
        """Show a text, on rank 0."""
        if self._speaks:
            for line in text.splitlines():
                self.screen.say(line)

    def record(self, record: StepRecord) -> None:
        """Show and write a record."""
        if self._speaks:
            self.screen.say(render_step_line(record, last_step=self._last_step))
            self._advise(record.verdict)
        if self._files is not None and (trouble := self._files.write_step(record)):
            self.say(trouble)
        for listener in self._listeners:
            listener(record)

    def _advise(self, verdict: str) -> None:
        """Show what takes the time, once."""
        kind = re.sub(r"\d+", "", verdict)
        if kind and kind not in self._advised:
            self._advised.add(kind)
            self.screen.say(verdict)

    def evaluation(self, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        """Show and write the results of an evaluation."""
        if self._speaks:
            said = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
            self.screen.say(f"evaluation after step {step}: {said}")
        if self._files is not None and (
            trouble := self._files.write_evaluation(step, epoch, numbers)
        ):
            self.say(trouble)

    def begin_saves(self) -> None:
        """Record that this run saves checkpoints."""
        if self._files is not None:
            self._files.begin_saves()

    def saved(self, text: str, save: Mapping[str, object]) -> None:
        """Show and write the result of a save."""
        self.say(text)
        if self._files is not None and (trouble := self._files.write_save(save)):
            self.say(trouble)

    def next_line(self, step: int, step_s: float) -> int:
        """Return the step of the next line, the same on every rank for the same time per step.

        A record is a collective, so no rank may decide by its own clock when to make one.
        """
        in_time = step + max(1, int(_SILENT_AT_MOST_S / step_s)) if step_s > 0 else step + 1
        return min(in_time, self.next_usual_line(step))

    def next_usual_line(self, step: int) -> int:
        """Return the step of the next line if steps are short."""
        usual = step - step % self._log_every + self._log_every
        if self._also_at is not None and step < self._also_at:
            return min(usual, self._also_at)
        return usual

    def close(self) -> None:
        """Remove the bar and close the files; another :meth:`open` may follow."""
        self.screen.close()
        self.screen = self._plain()
        if self._files is not None:
            self._files.close()


# For longer steps a record is shown at once: waiting for the other ranks takes little in
# comparison.
_SHOWN_AT_ONCE_S = 0.1


class StepLines:
    """Makes a record after the first step, and then whenever ``reports`` says one is due.

    For short steps, it is shown one step later: until then the ranks sum its numbers in the
    background.
    """

    def __init__(
        self, reports: Reports, tally: StepMetrics, *, loss_scale: Callable[[], float | None]
    ) -> None:
        """``loss_scale`` is called for each line only: it waits for the device."""
        self._reports = reports
        self._tally = tally
        self._loss_scale = loss_scale
        self._next = 1
        # Epoch, learning rate and gradient norm of the last step.
        self._last: tuple[int, float, float | torch.Tensor | None] = (0, 0.0, None)
        self._pending: tuple[int, PendingRecord] | None = None  # with its step
        self.last_record: StepRecord | None = None

    def note(self, *, epoch: int, learning_rate: float, norm: float | torch.Tensor | None) -> None:
        """Store the values of the last step for the next line."""
        self._last = (epoch, learning_rate, norm)

    def after_step(self, step: int) -> None:
        """Show a pending record, and start one if due (then a collective)."""
        self.flush()
        if step == self._next:
            self._begin(step)
            if self.last_record is None or self.last_record.step_s >= _SHOWN_AT_ONCE_S:
                self.flush()

    def finish(self, step: int) -> None:
        """Make a record of the remaining steps, if any."""
        self.flush()
        if self._tally.has_any:
            self._begin(step)
            self.flush()

    def _begin(self, step: int) -> None:
        epoch, rate, _ = self._last
        record = self._tally.record(
            step=step,
            epoch=epoch,
            learning_rate=rate,
            norm=self._norm(),
            loss_scale=self._loss_scale(),
        )
        self._pending = step, record

    def flush(self) -> None:
        """Show the pending record, if any; waits for the other ranks."""
        if self._pending is None:
            return
        (step, pending), self._pending = self._pending, None
        record = pending.finish()
        self._next = self._reports.next_line(step, record.step_s)
        self._reports.record(record)
        self.last_record = record

    def _norm(self) -> float | None:
        norm = self._last[2]
        return None if norm is None else float(norm)

    def state(self) -> dict[str, Any]:
        """Return the state from which a resumed run makes the same next line (a collective)."""
        self.flush()
        epoch, rate, _ = self._last
        last = [epoch, rate, self._norm()]
        return {"next": self._next, "last": last, "sums": self._tally.state()}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Restore a state; the next line may come sooner if lines are due more often now."""
        self._next = min(state["next"], self._reports.next_usual_line(step))
        epoch, rate, norm = state["last"]
        self._last = (epoch, rate, norm)
        self._tally.restore(state["sums"])
