"""``Reports``: where the lines of a run go on rank 0: screen, metrics files and callbacks."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torchmuster import untrusted
from torchmuster.runfolder import NO_ROOM, write_atomically
from torchmuster.train.step_line import StepRecord, render_step_line
from torchmuster.train.world import World
from torchmuster.units import format_seconds

# Lines in memory while the disk is full: tens of thousands. Later ones are dropped.
_MOST_WAITING_BYTES = 16 * 2**20
_REDRAW_EVERY_S = 0.5
_SILENT_AT_MOST_S = 10.0


class MetricsFiles:
    """Appends records to ``metrics/steps.jsonl``, ``evaluations.jsonl`` and ``saves.jsonl`` of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "metrics"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, _AppendedFile] = {}

    def add(self, name: str, record: Mapping[str, Any]) -> str | None:
        """Append one line; return a message about the disk, if there is one."""
        if name not in self._files:
            self._files[name] = _AppendedFile(self._path(name))
        # JSON has no NaN or Inf; they become null.
        line = msgspec.json.encode({**record, "at_unix_s": round(time.time(), 3)})
        return self._files[name].add(line + b"\n")

    def begin_saves(self) -> None:
        """Create the file of saves: from now on, saves are expected."""
        with contextlib.suppress(OSError):
            self._path("saves").touch()

    def cut_off_after(self, step: int, *, evaluated: int) -> None:
        """Delete all lines about later steps, and a partial line left by a killed process.

        Evaluations have a separate limit: the evaluation after a step may follow the step's save.
        """
        self.close()
        for name, last_step in (("steps", step), ("evaluations", evaluated)):
            path = self._path(name)
            if not path.exists():
                continue
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            remaining = [line for line in lines if _is_up_to(line, last_step)]
            if len(remaining) < len(lines):
                write_atomically(path, "".join(remaining))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _AppendedFile:
    """A file of lines; lines that do not fit on the disk wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._waiting = bytearray()
        self._full_since_s: float | None = None
        self._lost = 0

    def add(self, line: bytes) -> str | None:
        if len(self._waiting) + len(line) > _MOST_WAITING_BYTES:
            self._lost += 1
        else:
            self._waiting += line
        try:
            self._write_waiting()
        except OSError as error:
            if self._full_since_s is not None:
                return None
            self._full_since_s = time.monotonic()
            return (
                f"cannot write {self._path} ({error.strerror}): training continues, and the lines "
                "are kept in memory until the file can be written"
            )
        if self._full_since_s is None:
            return None
        duration = format_seconds(time.monotonic() - self._full_since_s)
        lost = self._lost or "no"
        self._full_since_s, self._lost = None, 0
        return f"{self._path} can be written again after {duration}: {lost} lines were lost"

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


class Lines:
    """Prints lines without buffering, for log files and other programs."""

    def say(self, line: str) -> None:
        """Print a line; if the disk is full, training continues without it."""
        try:
            print(line, flush=True)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise


class Bar(Lines):
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
        self._redraw_at_s = 0.0

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def move(self, step: int) -> None:
        """Redraw the bar if due; called at every step, so it must be cheap."""
        now_s = time.perf_counter()
        if now_s >= self._redraw_at_s:
            self._progress.update(self._task, completed=step, refresh=True)
            self._redraw_at_s = now_s + _REDRAW_EVERY_S

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


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
    ) -> None:
        """Report every ``log_every`` steps, and at least every 10 seconds.

        ``folder`` gets ``metrics/steps.jsonl``; ``on_record`` functions are called on rank 0 with each record.
        """
        self._speaks = world.is_first and not quiet
        self._log_every = log_every
        self._files = MetricsFiles(folder) if folder is not None and world.is_first else None
        self._listeners = tuple(on_record) if world.is_first else ()
        self._last_step: int | None = None
        self._saved_step: int | None = None  # since the last line
        self._advised: set[str] = set()
        self._lines = Lines()
        self.bar: Bar | None = None  # while a run trains on a terminal

    def open(self, last_step: int | None) -> None:
        """Start reporting; ``last_step`` is the last step of the run, if known."""
        self._last_step = last_step
        if self._speaks and sys.stdout.isatty():
            self.bar = Bar(last_step)

    def go_on_from(self, step: int, *, evaluated: int) -> None:
        """Delete the lines after a step, and later evaluations: these steps are repeated."""
        if self._files is not None:
            self._files.cut_off_after(step, evaluated=evaluated)

    def say(self, text: str) -> None:
        """Show a text, on rank 0."""
        if self._speaks:
            for line in text.splitlines():
                (self.bar or self._lines).say(line)

    def record(self, record: StepRecord) -> None:
        """Show and write a record."""
        line = render_step_line(record, last_step=self._last_step, saved_step=self._saved_step)
        self.say(line)
        self._saved_step = None
        kind = re.sub(r"\d+", "", record.verdict)  # what takes the time is shown once
        if kind not in self._advised:
            self._advised.add(kind)
            self.say(record.verdict)
        self._write("steps", record.as_json())
        for listener in self._listeners:
            listener(record)

    def evaluation(self, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        """Show and write the results of an evaluation."""
        results = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
        self.say(f"evaluation after step {step}: {results}")
        self._write("evaluations", {"step": step, "epoch": epoch, **numbers})

    def begin_saves(self) -> None:
        """Record that this run saves checkpoints."""
        if self._files is not None:
            self._files.begin_saves()

    def saved(self, step: int, problem: str, save: Mapping[str, object]) -> None:
        """Write the result of a save; show it in the next step line, or its problem at once."""
        if problem:
            self.say(problem)
        else:
            self._saved_step = step
        self._write("saves", save)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        if self._files is not None:
            self.say(self._files.add(name, record) or "")

    def next_line(self, step: int, step_s: float) -> int:
        """Return the step of the next line, the same on every rank for the same time per step.

        A record is a collective, so no rank may decide by its own clock when to make one.
        """
        in_time = step + 1
        if step_s > 0:
            in_time = step + max(1, int(_SILENT_AT_MOST_S / step_s))
        return min(in_time, self.next_usual_line(step))

    def next_usual_line(self, step: int) -> int:
        """Return the step of the next line if steps are short."""
        return step - step % self._log_every + self._log_every

    def close(self) -> None:
        """Remove the bar and close the files; another :meth:`open` may follow."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None
        if self._files is not None:
            self._files.close()
