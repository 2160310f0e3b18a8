"""What the folder of a run tells of it: its phase, its steps, its evaluations, its checkpoints."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from torchmuster.checkpoints.store import MARKER, step_of
from torchmuster.launch import ledger
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.monitor.sinks.sent import read_all
from torchmuster.runfolder import RunFolder

# Metrics that are a field of the newest line.
_OF_THE_LAST_LINE = {
    "epoch": catalogue.EPOCH,
    "learning_rate": catalogue.LEARNING_RATE,
    "gradient_norm": catalogue.GRADIENT_NORM,
    "loss_scale": catalogue.LOSS_SCALE,
    "samples_per_s": catalogue.SAMPLES_RATE,
    "tokens_per_s": catalogue.TOKENS_RATE,
    "step_s": catalogue.STEP_TIME,
    "flop_s": catalogue.FLOP_RATE,
    "mfu": catalogue.MFU,
    "memory_peak_bytes": catalogue.MEMORY_PEAK,
}
PARTS = ("data", "compute", "communication", "checkpoint", "evaluation")
# Told of the new lines about steps, and whether those before them do not count any more.
StepLines = Callable[[bool, Sequence[dict[str, Any]]], None]
_NOT_EVALUATED = ("step", "epoch", "at_unix_s")
# An evaluation may give as many numbers as it likes; so many become series.
_MOST_EVALUATED = 16


class RunMetrics:
    """Follows one run's folder."""

    def __init__(
        self, run: RunFolder, job: str, *, on_steps: StepLines = lambda anew, lines: None
    ) -> None:
        self._run = run
        self._labels = (job, run.id)
        self._on_steps = on_steps
        self._steps = GrowingFile(run.metrics / "steps.jsonl")
        self._evaluations = GrowingFile(run.metrics / "evaluations.jsonl")
        self._events = GrowingFile(run.path / ledger.EVENTS)
        self._forget_steps()
        self._last_evaluation: dict[str, Any] = {}
        self._restarts = 0

    @property
    def is_behind(self) -> bool:
        """Whether there are lines about steps that the last look did not come to."""
        return self._steps.is_behind

    @property
    def changed_unix_s(self) -> float | None:
        """When the last line about steps was written, as far as was seen."""
        return self._steps.changed_unix_s

    def _forget_steps(self) -> None:
        self._last: dict[str, Any] = {}
        self._skipped = 0
        self._useful_s = 0.0

    def samples(self, now_unix_s: float) -> Iterator[Sample]:
        """Yield what the run is like now; nothing of what it does not have yet."""
        self.catch_up()
        state = ledger.read_state(self._run)
        if state is None:
            return
        yield self._sample(catalogue.RUN_PHASE, 1.0, state.phase)
        yield self._sample(catalogue.RUN_STARTED, state.started_unix_s)
        yield self._sample(catalogue.RUN_RESTARTS, self._restarts)
        until = now_unix_s if state.active else state.since_unix_s
        if self._last:
            yield from self._of_steps(until, lasts_s=until - state.started_unix_s)
        yield from self._of_checkpoints(until)
        for name, value in list(self._last_evaluation.items())[:_MOST_EVALUATED]:
            if _is_number(value):
                yield self._sample(catalogue.EVALUATION, value, name)
        for name, sent in read_all(self._run).items():
            yield self._sample(catalogue.SINK_FAILING, sent.failing_s(until), name)

    def catch_up(self) -> None:
        """Read what is new in the folder, as much as one look reads at most."""
        anew, lines = self._steps.new_lines()
        if anew:
            self._forget_steps()
        for line in lines:
            self._add(line)
        self._on_steps(anew, lines)
        _, evaluations = self._evaluations.new_lines()
        if evaluations:
            last = evaluations[-1]
            self._last_evaluation = {k: v for k, v in last.items() if k not in _NOT_EVALUATED}
        anew, events = self._events.new_lines()
        before = 0 if anew else self._restarts
        self._restarts = before + sum(one.get("event") == ledger.RESTART for one in events)

    def _add(self, line: dict[str, Any]) -> None:
        step, step_s = line.get("step"), line.get("step_s")
        if not isinstance(step, int) or not _is_number(step_s):
            return
        self._skipped += int(line.get("skipped_steps") or 0)
        steps = max(0, step - int(self._last.get("step", 0)))
        aside = sum(
            float(line.get(f"{part}_share") or 0.0) for part in ("checkpoint", "evaluation")
        )
        self._useful_s += steps * float(step_s) * max(0.0, 1.0 - aside)
        self._last = line

    def _of_steps(self, until_unix_s: float, *, lasts_s: float) -> Iterator[Sample]:
        last = self._last
        yield self._sample(catalogue.STEPS, last["step"])
        # A loss that is no number was written as null, and must not look like one that is missing.
        loss = last.get("loss")
        yield self._sample(catalogue.LOSS, loss if _is_number(loss) else math.nan)
        yield self._sample(catalogue.SKIPPED_STEPS, self._skipped)
        for field, metric in _OF_THE_LAST_LINE.items():
            if _is_number(value := last.get(field)):
                yield self._sample(metric, value)
        for part in PARTS:
            if _is_number(share := last.get(f"{part}_share")):
                yield self._sample(catalogue.TIME_SHARE, share, part)
        if self._steps.changed_unix_s is not None:
            age_s = max(0.0, until_unix_s - self._steps.changed_unix_s)
            yield self._sample(catalogue.STEP_AGE, age_s)
        if lasts_s > 0:
            yield self._sample(catalogue.GOODPUT, min(1.0, self._useful_s / lasts_s))

    def _of_checkpoints(self, until_unix_s: float) -> Iterator[Sample]:
        """Yield the newest one's age and step; those in object storage are not looked at."""
        newest: tuple[float, int] | None = None
        for marker in self._run.checkpoints.glob(f"step-*/{MARKER}"):
            step = step_of(marker.parent.name)
            with contextlib.suppress(OSError):  # it may be deleted meanwhile
                if step is not None:
                    newest = max(newest or (0.0, 0), (marker.stat().st_mtime, step))
        if newest is not None:
            yield self._sample(catalogue.CHECKPOINT_AGE, max(0.0, until_unix_s - newest[0]))
            yield self._sample(catalogue.CHECKPOINT_STEP, newest[1])

    def _sample(self, metric: Metric, value: float, *labels: str) -> Sample:
        return Sample(metric, (*self._labels, *labels), float(value))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
