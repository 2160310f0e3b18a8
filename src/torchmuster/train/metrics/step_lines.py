"""When a training's lines are due, and what they are made of; it can be kept and gone on from."""

from collections.abc import Callable
from typing import Any

import torch

from torchmuster.train.metrics.reports import Reports
from torchmuster.train.metrics.step_line import StepRecord
from torchmuster.train.metrics.tally import PendingRecord, Tally

# Where a step takes longer, a record is shown at once: waiting for the other ranks is little beside it.
_SHOWN_AT_ONCE_S = 0.1


class StepLines:
    """Makes a record after the first step, and then as often as ``reports`` says.

    Where steps are quick, it is shown one step later: until then the ranks add up its numbers beside the training.
    """

    def __init__(
        self, reports: Reports, tally: Tally, *, loss_scale: Callable[[], float | None]
    ) -> None:
        """``loss_scale`` is asked with each line only: its answer waits for the device."""
        self._reports = reports
        self._tally = tally
        self._loss_scale = loss_scale
        self._next = 1
        # Of the last step: its epoch, learning rate and gradient norm.
        self._last: tuple[int, float, float | torch.Tensor | None] = (0, 0.0, None)
        self._pending: tuple[int, PendingRecord] | None = None  # with its step
        self.last_record: StepRecord | None = None

    def note(self, *, epoch: int, learning_rate: float, norm: float | torch.Tensor | None) -> None:
        """Keep what a line says about its last step."""
        self._last = (epoch, learning_rate, norm)

    def after_step(self, step: int) -> None:
        """Show a record that is pending, and begin one if one is due (then a collective)."""
        self.flush()
        if step == self._next:
            self._begin(step)
            if self.last_record is None or self.last_record.step_s >= _SHOWN_AT_ONCE_S:
                self.flush()

    def finish(self, step: int) -> None:
        """Make a record of what is left, if anything is."""
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
        """Show the record that is pending, if one is; waits for the other ranks."""
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
        """Return what is needed to make the next line as if nothing had happened (a collective)."""
        self.flush()
        epoch, rate, _ = self._last
        last = [epoch, rate, self._norm()]
        return {"next": self._next, "last": last, "sums": self._tally.state()}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Go on from a state; a line may come sooner than it would have, if lines are due more often now."""
        self._next = min(state["next"], self._reports.next_usual_line(step))
        epoch, rate, norm = state["last"]
        self._last = (epoch, rate, norm)
        self._tally.restore(state["sums"])
