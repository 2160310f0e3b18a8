"""What the folder of a run tells of it: its phase, its steps, its evaluations, its checkpoints."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from torchmuster.launch.history import run_state
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting.checkpoint_metrics import CheckpointMetrics
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.collecting.run_course import RunCourse
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
        self._course = RunCourse(run)
        self._checkpoints = CheckpointMetrics(run, self._labels)
        self._forget_steps()
        self._last_evaluation: dict[str, Any] = {}

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
        state = run_state.read_state(self._run)
        if state is None:
            return
        yield self._sample(catalogue.RUN_PHASE, 1.0, state.phase)
        yield self._sample(catalogue.RUN_STARTED, state.started_unix_s)
        yield self._sample(catalogue.RUN_RESTARTS, self._course.restarts)
        if self._course.ranks_started:
            yield self._sample(catalogue.RUN_RANKS_STARTED, self._course.ranks_started)
        until = now_unix_s if state.active else state.since_unix_s
        if self._last:
            yield from self._of_steps(until, lasts_s=self._course.lasts_s(state, until))
        yield from self._checkpoints.samples(until, state.started_unix_s)
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
        self._course.catch_up()

    def _add(self, line: dict[str, Any]) -> None:
        step, step_s = line.get("step"), line.get("step_s")
        if not isinstance(step, int) or not _is_number(step_s):
            return
        skipped = int(line.get("skipped_steps") or 0)
        self._skipped += skipped
        steps = max(0, step - int(self._last.get("step", 0)) - skipped)
        aside = sum(
            float(line.get(f"{part}_share") or 0.0) for part in ("checkpoint", "evaluation")
        )
        self._useful_s += steps * float(step_s) * max(0.0, 1.0 - aside)
        self._last = line

    def _of_steps(self, until_unix_s: float, *, lasts_s: float) -> Iterator[Sample]:
        last = self._last
        yield self._sample(catalogue.STEPS, last["step"])
        if (loss := _loss(last)) is not None:
            yield self._sample(catalogue.LOSS, loss)
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

    def _sample(self, metric: Metric, value: float, *labels: str) -> Sample:
        return Sample(metric, (*self._labels, *labels), float(value))


def _loss(line: dict[str, Any]) -> float | None:
    """Return a line's loss: NaN where it was no number, which is written as null; None if nothing is known of it.

    fp16 skips steps while it looks for its scale. Where all steps of a line were skipped so, nobody knows the loss.
    """
    if _is_number(loss := line.get("loss")):
        return loss
    scale = line.get("loss_scale")
    return None if _is_number(scale) and scale >= 1 else math.nan


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
