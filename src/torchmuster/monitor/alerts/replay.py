"""The alerts of a past run, recomputed by replaying its step lines with their timestamps.

Step lines have no data on ranks, hosts and devices, so only alerts about steps are found.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchmuster.monitor import catalogue
from torchmuster.monitor.alerts.rules import Alert
from torchmuster.monitor.alerts.watching import AlertWatch
from torchmuster.monitor.collecting.run_metrics import loss_of_line
from torchmuster.monitor.metric import Sample

# Conditions cover minutes: evaluating a long run at intervals is enough and bounds the cost.
_SHORTEST_S, _LONGEST_S = 15.0, 60.0
_LOOKS_BEFORE_LESS_OFTEN = 1000


@dataclass(frozen=True, kw_only=True)
class PastAlert:
    """An alert that was raised once or several times during a run."""

    alert: Alert
    summary: str
    fix: str
    times: int
    first_step: int
    last_step: int | None  # None: still raised at the end


class Replay:
    """Evaluates the step lines of a run in order."""

    def __init__(self, job: str, run_id: str) -> None:
        self._labels = (job, run_id)
        self._watching = AlertWatch()
        self._now_s = 0.0
        self._next_s = 0.0
        self._step = 0
        self._skipped = 0
        self._bad = False
        self._past: dict[str, PastAlert] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Process a step line."""
        step, step_s, loss = line.get("step"), line.get("step_s"), loss_of_line(line)
        if not isinstance(step, int) or not isinstance(step_s, int | float):
            return
        took_s = max(0, step - self._step) * float(step_s)
        self._now_s += took_s
        self._step = step
        self._skipped += int(line.get("skipped_steps") or 0)
        bad = loss is not None and math.isnan(loss)
        # A NaN may last for one line only and must not be missed between two evaluations.
        if self._now_s < self._next_s and bad == self._bad and took_s < _LONGEST_S:
            return
        self._bad = bad
        self._next_s = self._now_s + min(
            _LONGEST_S, max(_SHORTEST_S, self._now_s / _LOOKS_BEFORE_LESS_OFTEN)
        )
        self._look(line, took_s, loss)

    def _look(self, line: Mapping[str, Any], took_s: float, loss: float | None) -> None:
        samples = [
            Sample(catalogue.RUN_PHASE, (*self._labels, "running"), 1.0),
            Sample(catalogue.STEP_AGE, self._labels, took_s),
            Sample(catalogue.SKIPPED_STEPS, self._labels, float(self._skipped)),
        ]
        if loss is not None:
            samples.append(Sample(catalogue.LOSS, self._labels, loss))
        data = line.get("data_share")
        if isinstance(data, int | float):
            samples.append(Sample(catalogue.TIME_SHARE, (*self._labels, "data"), float(data)))
        for news in self._watching.look(samples, self._now_s):
            name = news.alert.name
            before = self._past.get(name)
            if not news.raised and before is not None:
                self._past[name] = replace(before, last_step=self._step)
            elif before is not None:
                self._past[name] = replace(before, times=before.times + 1, last_step=None)
            else:
                self._past[name] = PastAlert(
                    alert=news.alert,
                    summary=news.summary,
                    fix=news.fix,
                    times=1,
                    first_step=self._step,
                    last_step=None,
                )

    @property
    def alerts(self) -> list[PastAlert]:
        """The alerts raised so far, ordered by their first occurrence."""
        return list(self._past.values())
