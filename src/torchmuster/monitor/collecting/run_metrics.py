"""Metrics from a run folder: phase, steps, evaluations, checkpoints."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torchmuster.launch.history import run_state
from torchmuster.launch.job import is_ours
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.runfolder import RunFolder

# Metrics that are a field of the newest step line.
_OF_THE_LAST_LINE = {
    "epoch": catalogue.EPOCH,
    "learning_rate": catalogue.LEARNING_RATE,
    "gradient_norm": catalogue.GRADIENT_NORM,
    "samples_per_s": catalogue.SAMPLES_RATE,
    "tokens_per_s": catalogue.TOKENS_RATE,
    "step_s": catalogue.STEP_TIME,
    "mfu": catalogue.MFU,
    "memory_peak_bytes": catalogue.MEMORY_PEAK,
}
# What a script logs less often than lines are made.
_LOGGED = ("loss", "gradient_norm", "epoch")
PARTS = ("data", "compute", "communication", "checkpoint", "evaluation")
_NOT_EVALUATED = ("step", "epoch", "at_unix_s")
_MOST_EVENTS = 200  # kept for views
# Maximum number of evaluation results exported as series.
_MOST_EVALUATED = 16


class CheckpointMetrics:
    """Follows the saves of one run.

    The training records its saves wherever they go, including to object storage.
    """

    def __init__(self, run: RunFolder, labels: tuple[str, ...]) -> None:
        self._run = run
        self._labels = labels
        self._saves = GrowingFile(run.metrics / "saves.jsonl")
        self._committed: tuple[float, int] | None = None  # time and step
        self._last: dict[str, Any] | None = None

    def samples(
        self, until_unix_s: float, started_unix_s: float, *, trains: bool = False
    ) -> Iterator[Sample]:
        """Yield the samples of the newest checkpoint and of the last save.

        ``trains`` marks a script that should save.
        """
        _, lines = self._saves.new_lines()
        for line in lines:
            self._add(line)
        newest = self._committed
        # A training of torchmuster that saves has the file from its first step on; a script has it from its first save on.
        if newest is not None or self._saves.changed_unix_s is not None or trains:
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


class FollowedEvents:
    """Follows the events of one run, over all its launches.

    The state of a resumed run (``--resume``) starts over, but its step count continues. So the run
    time continues too, without the time between the two launches.
    """

    def __init__(self, run: RunFolder) -> None:
        self._file = GrowingFile(run.events)
        self._forget()

    def _forget(self) -> None:
        self.newest: deque[run_state.RunEvent] = deque(maxlen=_MOST_EVENTS)
        self.restarts = 0
        self.ranks_started = 0  # maximum at one time, since launch
        self._begun: float | None = None
        self._ended: list[tuple[float, float]] = []  # start and end of earlier launches

    def catch_up(self) -> None:
        """Process the events since the last poll."""
        anew, lines = self._file.new_lines()
        if anew:
            self._forget()
        for line in lines:
            event = run_state.event_of(line)
            if event is not None:
                self._add(event)

    def _add(self, event: run_state.RunEvent) -> None:
        self.newest.append(event)
        self.restarts += event.name == run_state.RESTART
        if event.name == "started":
            self.ranks_started = max(self.ranks_started, event.fact("ranks", int) or 0)
        if self._begun is None:
            self._begun = event.at_unix_s
        if "exit_code" in event.facts:
            self.ranks_started = 0
            self._ended.append((self._begun, event.at_unix_s))
            self._begun = None

    def lasts_s(self, state: run_state.RunState, until_unix_s: float) -> float:
        """Return the total run time until a moment, over all launches."""
        before_s = sum(end - begun for begun, end in self._ended if end <= state.started_unix_s)
        return before_s + until_unix_s - state.started_unix_s


# Called with the new step lines, and whether earlier lines became invalid.
StepLines = Callable[[bool, Sequence[dict[str, Any]]], None]


class RunMetrics:
    """Follows one run's folder."""

    def __init__(
        self, run: RunFolder, job: str, *, on_steps: StepLines = lambda anew, lines: None
    ) -> None:
        self.folder = run
        self.labels = (job, run.id)
        self._on_steps = on_steps
        self._steps = GrowingFile(run.metrics / "steps.jsonl")
        self._evaluations = GrowingFile(run.metrics / "evaluations.jsonl")
        self.events = FollowedEvents(run)
        self._checkpoints = CheckpointMetrics(run, self.labels)
        self._job: run_state.RunJob | None = None
        self._forget_steps()
        self._last_evaluation: dict[str, Any] = {}

    @property
    def is_behind(self) -> bool:
        """Whether the last poll left step lines unread."""
        return self._steps.is_behind

    def _forget_steps(self) -> None:
        self._last: dict[str, Any] = {}
        self._skipped = 0
        self._useful_s = 0.0

    def samples(self, now_unix_s: float) -> Iterator[Sample]:
        """Yield the current samples of the run; values it does not have yet are left out."""
        self.catch_up()
        state = run_state.read_state(self.folder)
        if state is None:
            return
        yield self._sample(catalogue.RUN_PHASE, 1.0, state.phase)
        yield self._sample(catalogue.RUN_STARTED, state.started_unix_s)
        yield self._sample(catalogue.RUN_RESTARTS, self.events.restarts)
        if self.events.ranks_started:
            yield self._sample(catalogue.RUN_RANKS_STARTED, self.events.ranks_started)
        until = now_unix_s if state.active else state.since_unix_s
        if self._last:
            yield from self._of_steps(until, lasts_s=self.events.lasts_s(state, until))
        trains = bool(self._last) and self._is_script()
        yield from self._checkpoints.samples(until, state.started_unix_s, trains=trains)
        for name, value in list(self._last_evaluation.items())[:_MOST_EVALUATED]:
            if _is_number(value):
                yield self._sample(catalogue.EVALUATION, value, name)

    def _is_script(self) -> bool:
        """Return whether the run is of the user's own script; its job does not change."""
        if self._job is None:
            self._job = run_state.read_job(self.folder)
        return self._job is not None and not is_ours(self._job.command)

    def catch_up(self) -> None:
        """Read new data from the folder, up to the limit of one poll."""
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
        self.events.catch_up()

    def _add(self, line: dict[str, Any]) -> None:
        step, step_s = line.get("step"), line.get("step_s")
        if not isinstance(step, int) or not _is_number(step_s):
            return
        skipped = line.get("skipped_steps")
        if not isinstance(skipped, int):
            skipped = 0
        self._skipped += skipped
        steps = max(0, step - int(self._last.get("step", 0)) - skipped)
        useful = 1.0
        for part in ("checkpoint", "evaluation"):
            share = line.get(f"{part}_share")
            if _is_number(share):
                useful -= share
        self._useful_s += steps * float(step_s) * max(0.0, useful)
        logged = {name: self._last[name] for name in _LOGGED if name in self._last}
        self._last = logged | line

    def _of_steps(self, until_unix_s: float, *, lasts_s: float) -> Iterator[Sample]:
        last = self._last
        yield self._sample(catalogue.STEPS, last["step"])
        if (loss := loss_of_line(last)) is not None:
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
        return Sample(metric, (*self.labels, *labels), float(value))


def loss_of_line(line: Mapping[str, Any]) -> float | None:
    """Return the loss of a step line: NaN if it was written as null; None if unknown.

    A script that logs no loss has lines without one. fp16 skips steps while it searches for its loss
    scale. If all steps of a line were skipped, the loss is unknown.
    """
    if "loss" not in line:
        return None
    if _is_number(loss := line["loss"]):
        return loss
    scale = line.get("loss_scale")
    return None if _is_number(scale) and scale >= 1 else math.nan


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
