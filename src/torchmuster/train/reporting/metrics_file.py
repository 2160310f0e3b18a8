"""The numbers of a run as files: one JSON line for each line that people read.

``metrics/steps.jsonl`` and ``metrics/evaluations.jsonl`` in the run's folder; a file that is there is
continued. Each line is complete when it is written, so that others can read along. A run that goes on
from an earlier step cuts off what came after it, so that each step is there once.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torchmuster.runfolder import write_atomically
from torchmuster.train.reporting.step_line import StepRecord

_STEPS, _EVALUATIONS = "steps.jsonl", "evaluations.jsonl"


class MetricsFile:
    """Writes records into a folder's ``metrics``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "metrics"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    def write_step(self, record: StepRecord) -> None:
        """Add one line about steps."""
        self._write(_STEPS, record.as_json())

    def write_evaluation(self, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        """Add one line about an evaluation."""
        self._write(_EVALUATIONS, {"step": step, "epoch": epoch, **numbers})

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

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("a", encoding="utf-8", buffering=1)
        # JSON has no NaN; what is not a number is null.
        plain = {key: None if _is_bad(value) else value for key, value in line.items()}
        self._files[name].write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _is_bad(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_up_to(line: str, step: int) -> bool:
    """Say whether a line is whole and about a step that is not later."""
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False
