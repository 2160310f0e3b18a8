"""The numbers of a run as files: one JSON line for each line that people read.

``metrics/steps.jsonl``, ``metrics/evaluations.jsonl`` and ``metrics/saves.jsonl`` in the run's folder; a file that is
there is continued. Each line is complete when it is written, so that others can read along. A run that goes on
from an earlier step cuts off what came after it, so that each step is there once; that a save was made stays true.

A disk that is full, or gone, does not end a training: lines wait in memory until they can be written.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.runfolder import write_atomically
from torchmuster.train.metrics.step_line import StepRecord
from torchmuster.units import format_seconds

_STEPS, _EVALUATIONS, _SAVES = "steps.jsonl", "evaluations.jsonl", "saves.jsonl"
# What waits for room: tens of thousands of lines. What comes after that is not kept.
_MOST_WAITING_BYTES = 16 * 2**20


class MetricsFile:
    """Writes records into a folder's ``metrics``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "metrics"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, _Growing] = {}

    def write_step(self, record: StepRecord) -> str:
        """Add one line about steps; return what is to be said about the disk, if anything is."""
        return self._write(_STEPS, record.as_json())

    def write_evaluation(self, step: int, epoch: int, numbers: Mapping[str, float]) -> str:
        """Add one line about an evaluation; return what is to be said about the disk, if anything is."""
        return self._write(_EVALUATIONS, {"step": step, "epoch": epoch, **numbers})

    def begin_saves(self) -> None:
        """Make the file of saves: from now on, one that does not come is missing."""
        with contextlib.suppress(OSError):
            (self._folder / _SAVES).touch()

    def write_save(self, save: Mapping[str, Any]) -> str:
        """Add one line about a save, committed or failed; return what is to be said about the disk."""
        return self._write(_SAVES, save)

    def cut_off_after(self, step: int, *, evaluated: int) -> None:
        """Take out all lines about later steps, and what a killed process left half written.

        Evaluations have an end of their own: that of a state's last step may come after it was saved.
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
        # JSON has no NaN; what is not a number becomes null.
        content = msgspec.json.encode({**line, "at_unix_s": round(time.time(), 3)})
        return self._files[name].add(content + b"\n")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _Growing:
    """A file that lines are added to; those that find no room wait, and the file goes on where it broke off."""

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
                f"{self._path} cannot be written ({error.strerror}): the training goes on, and its lines "
                "are kept in memory until they can be"
            )
        if self._full_since_s is None:
            return ""
        took = format_seconds(time.monotonic() - self._full_since_s)
        lost = f", but {self._lost} of them that were too many" if self._lost else ""
        self._full_since_s, self._lost = None, 0
        return (
            f"{self._path} can be written again after {took}: it has all lines of that time{lost}"
        )

    def _write_waiting(self) -> None:
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)
        while self._waiting:  # a disk that is nearly full takes a part of a line
            del self._waiting[: os.write(self._file, self._waiting)]

    def close(self) -> None:
        if self._waiting:
            with contextlib.suppress(OSError):
                self._write_waiting()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is_up_to(line: str, step: int) -> bool:
    """Say whether a line is whole and about a step that is not later."""
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False
