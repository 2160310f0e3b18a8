"""What a run has saved: how old the newest checkpoint is, and how long the training stood still for it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torchmuster.checkpoints.store import MARKER, step_of
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.metric import Sample
from torchmuster.runfolder import RunFolder


class CheckpointMetrics:
    """Follows the saves of one run.

    What the training says of its saves is known wherever they go, also to object storage. What lies in the run's own
    folder is looked at as well: it may have been saved by a run that did not say so.
    """

    def __init__(self, run: RunFolder, labels: tuple[str, ...]) -> None:
        self._run = run
        self._labels = labels
        self._saves = GrowingFile(run.metrics / "saves.jsonl")
        self._committed: tuple[float, int] | None = None  # when, and which step
        self._last: dict[str, Any] | None = None

    def samples(self, until_unix_s: float, started_unix_s: float) -> Iterator[Sample]:
        """Yield what is known of the newest checkpoint and of the last save."""
        _, lines = self._saves.new_lines()
        for line in lines:
            self._add(line)
        newest = max(filter(None, [self._committed, self._in_folder()]), default=None)
        # A run that saves has the file from its first step on.
        if newest is not None or self._saves.changed_unix_s is not None:
            since = started_unix_s if newest is None else newest[0]
            yield Sample(catalogue.CHECKPOINT_AGE, self._labels, max(0.0, until_unix_s - since))
        if newest is not None:
            yield Sample(catalogue.CHECKPOINT_STEP, self._labels, float(newest[1]))
        if self._last is not None:
            stall_s = float(self._last["stall_s"])
            yield Sample(catalogue.CHECKPOINT_STALL, self._labels, stall_s)

    def _add(self, line: dict[str, Any]) -> None:
        at, step, stall_s = line.get("at_unix_s"), line.get("step"), line.get("stall_s")
        if not isinstance(at, int | float) or not isinstance(step, int):
            return
        if isinstance(stall_s, int | float):
            self._last = line
        if not line.get("problem"):
            self._committed = (float(at), step)

    def _in_folder(self) -> tuple[float, int] | None:
        newest: tuple[float, int] | None = None
        for marker in self._run.checkpoints.glob(f"step-*/{MARKER}"):
            step = step_of(marker.parent.name)
            with contextlib.suppress(OSError):  # it may be deleted meanwhile
                if step is not None:
                    newest = max(newest or (0.0, 0), (marker.stat().st_mtime, step))
        return newest
