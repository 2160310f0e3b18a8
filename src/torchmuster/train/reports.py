"""``Reports``: where the lines of a run go on rank 0: screen, metrics files and callbacks."""

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchmuster import untrusted
from torchmuster.runfolder import NO_ROOM, write_atomically
from torchmuster.train.step_line import StepRecord, render_step_line
from torchmuster.train.world import World

_SILENT_AT_MOST_S = 10.0


class MetricsFiles:
    """Appends records to ``metrics/steps.jsonl``, ``evaluations.jsonl`` and ``saves.jsonl`` of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "metrics"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._failed: set[Path] = set()  # files whose last line may be cut

    def add(self, name: str, record: Mapping[str, Any]) -> str:
        """Append one line; return a message if the file cannot be written, once."""
        path = self._path(name)
        # JSON has no NaN or Inf; they become null.
        line = msgspec.json.encode({**record, "at_unix_s": round(time.time(), 3)}) + b"\n"
        try:
            with path.open("ab") as file:
                if path in self._failed:
                    line = b"\n" + line
                file.write(line)
        except OSError as error:
            if path in self._failed:
                return ""
            self._failed.add(path)
            return f"cannot write {path} ({error.strerror}): training continues without these lines"
        return ""

    def begin_saves(self) -> None:
        """Create the file of saves: from now on, saves are expected."""
        with contextlib.suppress(OSError):
            self._path("saves").touch()

    def cut_off_after(self, step: int, *, evaluated: int) -> None:
        """Delete all lines about later steps, and a partial line left by a killed process.

        Evaluations have a separate limit: the evaluation after a step may follow the step's save.
        """
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


def _is_up_to(line: str, step: int) -> bool:
    """Return whether a line is complete and not about a later step."""
    try:
        return line.endswith("\n") and int(untrusted.parse_json(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def print_line(text: str) -> None:
    """Print without buffering, for log files; if the disk is full, training continues without the text."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


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
        self.last_step: int | None = None  # of the run, if known
        self._saved_step: int | None = None  # since the last line
        self._advised: set[str] = set()

    def go_on_from(self, step: int, *, evaluated: int) -> None:
        """Delete the lines after a step, and later evaluations: these steps are repeated."""
        if self._files is not None:
            self._files.cut_off_after(step, evaluated=evaluated)

    def say(self, text: str) -> None:
        """Show a text, on rank 0."""
        if self._speaks and text:
            print_line(text)

    def record(self, record: StepRecord) -> None:
        """Show and write a record."""
        line = render_step_line(record, last_step=self.last_step, saved_step=self._saved_step)
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

    def saved(self, step: int | None, problem: str, save: Mapping[str, object]) -> None:
        """Write the result of a save; show its step in the next step line, or its problem at once."""
        self.say(problem)
        self._saved_step = step
        self._write("saves", save)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        if self._files is not None:
            self.say(self._files.add(name, record))

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
