"""When a training's lines are due, and what they are made of; it can be kept and gone on from."""

from collections.abc import Callable
from typing import Any

from torchmuster.train.reporting.reports import Reports
from torchmuster.train.reporting.step_line import StepRecord
from torchmuster.train.reporting.tally import Tally


class StepLines:
    """Makes a record after the first step, and then as often as ``reports`` says."""

    def __init__(
        self, reports: Reports, tally: Tally, *, loss_scale: Callable[[], float | None]
    ) -> None:
        """``loss_scale`` is asked with each line only: its answer waits for the device."""
        self._reports = reports
        self._tally = tally
        self._loss_scale = loss_scale
        self._next = 1
        # Of the last step: its epoch, learning rate and gradient norm.
        self._last: tuple[int, float, float | None] = (0, 0.0, None)
        self.last_record: StepRecord | None = None

    def note(self, *, epoch: int, learning_rate: float, norm: float | None) -> None:
        """Keep what a line says about its last step."""
        self._last = (epoch, learning_rate, norm)

    def after_step(self, step: int) -> None:
        """Make a record if one is due (then a collective)."""
        if step == self._next:
            self._report(step)

    def finish(self, step: int) -> None:
        """Make a record of what is left, if anything is."""
        if self._tally.has_any:
            self._report(step)

    def _report(self, step: int) -> None:
        epoch, rate, norm = self._last
        record = self._tally.record(
            step=step, epoch=epoch, learning_rate=rate, norm=norm, loss_scale=self._loss_scale()
        )
        self._next = self._reports.next_line(step, record.step_s)
        self._reports.record(record)
        self.last_record = record

    def state(self) -> dict[str, Any]:
        """Return what is needed to make the next line as if nothing had happened (a collective)."""
        return {"next": self._next, "last": list(self._last), "sums": self._tally.state()}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Go on from a state; a line may come sooner than it would have, if lines are due more often now."""
        self._next = min(state["next"], self._reports.next_usual_line(step))
        epoch, rate, norm = state["last"]
        self._last = (epoch, rate, norm)
        self._tally.restore(state["sums"])
