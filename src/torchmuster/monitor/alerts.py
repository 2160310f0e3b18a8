"""All alerts: condition, text and fix.

``deploy/prometheus/torchmuster-rules.yml`` has the same alerts for Prometheus; a test compares
names, texts, durations and thresholds.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric, Scope

Severity = Literal["critical", "warning", "info"]
Labels = tuple[tuple[str, str], ...]  # (name, value), in the order of the metric's labels
RUN_FINISHED = "MusterRunFinished"
# The metrics whose earlier values an alert needs, and for how long.
WINDOWS_S = {
    catalogue.LOSS: 1800.0,
    catalogue.SKIPPED_STEPS: 600.0,
    catalogue.RUN_RANKS: 600.0,
}
# The fix of alerts about runs that muster launched.
EXPLAIN = "muster explain {run}"


@dataclass(kw_only=True)
class History:
    """The newest samples, and those of the metrics in ``WINDOWS_S`` with their times."""

    now: dict[Metric, dict[Labels, float]] = field(default_factory=dict)
    recent: dict[tuple[Metric, Labels], deque[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """One series of an alert's metric, and the samples that it is compared with."""

    metric: Metric
    labels: Labels
    value: float
    history: History

    @property
    def running(self) -> bool:
        """Whether the run of the series is in its running phase."""
        phases = self.history.now.get(catalogue.RUN_PHASE, {})
        return phases.get((*self._run, ("phase", "running"))) == 1

    @property
    def _run(self) -> Labels:
        return tuple(label for label in self.labels if label[0] in Scope.RUN.value)

    def has(self, name: str, value: str) -> bool:
        """Return whether a label has this value."""
        return (name, value) in self.labels

    def beside(self, metric: Metric) -> float:
        """Return the newest value of another metric with the same labels; NaN if unknown."""
        return self.history.now.get(metric, {}).get(self.labels, math.nan)

    def window(self) -> list[float]:
        """Return the values within the metric's window, oldest first."""
        return [value for _, value in self.history.recent.get((self.metric, self.labels), ())]

    def median(self) -> float:
        """Return the median of the finite values within the metric's window; NaN without any."""
        finite = list(filter(math.isfinite, self.window()))
        return statistics.median(finite) if finite else math.nan

    def waiting_spread(self) -> float:
        """Return how much more one rank of the run waits for others than another; 0 if unknown."""
        waits = self.history.now.get(catalogue.RANK_WAITING, {})
        values = [value for labels, value in waits.items() if labels[: len(self._run)] == self._run]
        return max(values, default=0.0) - min(values, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert, evaluated for each series of ``metric``.

    ``when`` gets the series and ``limit``. ``summary`` may contain labels such as ``{run}``, and the
    measured ``{value}`` or ``{percent}``.
    """

    name: str
    severity: Severity
    metric: Metric
    when: Callable[[Series, float], bool]
    limit: float = 0.0  # what `when` compares with
    for_s: float = 0.0  # how long it must hold before it is raised
    shown: Callable[[Series], float] = lambda series: series.value
    summary: str
    why: str
    fix: str


ALERTS: tuple[Alert, ...] = (
    Alert(
        name="MusterStalled",
        severity="critical",
        metric=catalogue.STEP_AGE,
        when=lambda series, limit: series.running and series.value > limit,
        limit=300,
        summary="{job}: no step for {value} s (run {run})",
        why="ranks wait for each other or for a disk, or a step or an evaluation takes longer "
        "than 5 minutes",
        fix=EXPLAIN,
    ),
    Alert(
        name="MusterLossNotANumber",
        severity="critical",
        metric=catalogue.LOSS,
        when=lambda series, limit: series.running and math.isnan(series.value),
        summary="{job}: the loss is NaN (run {run})",
        why="the gradients exploded, or a sample is invalid",
        fix="resume from an earlier checkpoint; lower the learning rate, clip gradients, or use "
        "bf16 instead of fp16",
    ),
    Alert(
        name="MusterLossSpike",
        severity="warning",
        metric=catalogue.LOSS,
        when=lambda series, limit: series.running and series.value > limit * series.median() > 0,
        limit=3,
        for_s=120,
        summary="{job}: the loss is {value}, over 3 times its 30-minute median (run {run})",
        why="bad data, or the learning rate is too high",
        fix="compare with the gradient norm; clip gradients, or resume from an earlier checkpoint",
    ),
    Alert(
        name="MusterSkippedSteps",
        severity="warning",
        metric=catalogue.SKIPPED_STEPS,
        when=lambda series, limit: series.running and series.value > min(series.window()),
        for_s=600,
        summary="{job}: optimizer steps are skipped, {value} so far (run {run})",
        why="gradients are not finite; occasional skips are normal with fp16 only",
        fix="use bf16 instead of fp16, or lower the learning rate",
    ),
    Alert(
        name="MusterDataStarved",
        severity="warning",
        metric=catalogue.TIME_SHARE,
        when=lambda series, limit: (
            series.running and series.has("part", "data") and series.value > limit
        ),
        limit=0.3,
        for_s=300,
        summary="{job}: data loading takes {percent} of the time (run {run})",
        why="the data loader is slower than the training step",
        fix="muster bench data finds the best number of loader workers; use faster storage, or "
        "preprocess the data",
    ),
    Alert(
        name="MusterStraggler",
        severity="warning",
        metric=catalogue.RUN_PHASE,
        when=lambda series, limit: (
            series.has("phase", "running") and series.waiting_spread() > limit
        ),
        limit=0.2,
        shown=Series.waiting_spread,
        for_s=300,
        summary="{job}: straggler: ranks wait up to {percent} of the time for the slowest rank "
        "(run {run})",
        why="one rank is slower than the others: the one with the lowest "
        "muster_rank_communication_ratio",
        fix="muster watch {run} shows the rank; check its host and GPU",
    ),
    Alert(
        name="MusterCheckpointOld",
        severity="warning",
        metric=catalogue.CHECKPOINT_AGE,
        when=lambda series, limit: series.running and series.value > limit,
        limit=10_800,
        for_s=300,
        summary="{job}: no checkpoint for {value} s (run {run})",
        why="a failure now would lose all steps since the last checkpoint",
        fix="find out why saving fails: muster explain {run}; or save more often (muster train: "
        "checkpoint.every)",
    ),
    Alert(
        name="MusterGoodputLow",
        severity="warning",
        metric=catalogue.GOODPUT,
        when=lambda series, limit: series.running and series.value < limit,
        limit=0.5,
        for_s=1800,
        summary="{job}: low goodput: {percent} of the time went into useful steps (run {run})",
        why="restarts, saving, evaluation or waiting take the rest",
        fix=EXPLAIN,
    ),
    Alert(
        name="MusterRanksLost",
        severity="critical",
        metric=catalogue.RUN_RANKS,
        when=lambda series, limit: (
            series.running
            and series.value < max(series.window())
            and series.value < series.beside(catalogue.RUN_RANKS_STARTED)
        ),
        for_s=60,
        summary="{job}: only {value} ranks send heartbeats (run {run})",
        why="a host or its ranks are lost",
        fix=EXPLAIN,
    ),
    Alert(
        name="MusterRunFailed",
        severity="critical",
        metric=catalogue.RUN_PHASE,
        when=lambda series, limit: series.has("phase", "failed"),
        summary="{job}: run {run} has failed",
        why="a rank or the launcher failed; the logs of the ranks are in the run folder",
        fix=EXPLAIN,
    ),
    Alert(
        name="MusterLauncherDied",
        severity="critical",
        metric=catalogue.RUN_PHASE,
        when=lambda series, limit: series.has("phase", "died"),
        summary="{job}: the launcher of run {run} died",
        why="it was killed, or its host is down",
        fix=EXPLAIN,
    ),
    Alert(
        name=RUN_FINISHED,
        severity="info",
        metric=catalogue.RUN_PHASE,
        when=lambda series, limit: series.has("phase", "finished"),
        summary="{job}: run {run} has finished",
        why="",
        fix="muster runs",
    ),
    Alert(
        name="MusterGpuHot",
        severity="warning",
        metric=catalogue.GPU_TEMPERATURE,
        when=lambda series, limit: (
            series.value > limit * series.beside(catalogue.GPU_SLOWDOWN_TEMPERATURE)
        ),
        limit=0.97,
        for_s=300,
        summary="{host}: GPU {gpu_uuid} is at {value} °C",
        why="it will throttle soon and slow down all ranks",
        fix="check fans, dust and airflow; lower the power limit",
    ),
    Alert(
        name="MusterGpuThrottled",
        severity="warning",
        metric=catalogue.GPU_THROTTLED,
        when=lambda series, limit: series.value == 1,
        for_s=600,
        summary="{host}: GPU {gpu_uuid} is throttled ({reason})",
        why="temperature or power limit reached",
        fix="muster doctor explains the reason",
    ),
    Alert(
        name="MusterGpuMemoryErrors",
        severity="critical",
        metric=catalogue.GPU_ECC,
        when=lambda series, limit: series.has("kind", "uncorrected") and series.value > limit,
        limit=0,
        summary="{host}: GPU {gpu_uuid} has {value} uncorrected memory (ECC) errors",
        why="results may be wrong, and the next error may crash the run",
        fix="reboot the host; if the errors come back, replace the GPU",
    ),
    Alert(
        name="MusterGpuMemoryNearLimit",
        severity="info",
        metric=catalogue.GPU_MEMORY_USED,
        when=lambda series, limit: (
            series.value > limit * series.beside(catalogue.GPU_MEMORY_USABLE)
        ),
        limit=0.98,
        for_s=300,
        summary="{host}: the memory of GPU {gpu_uuid} is almost full",
        why="a batch with longer sequences may not fit",
        fix="muster plan shows what reduces memory",
    ),
    Alert(
        name="MusterHostMemoryLow",
        severity="critical",
        metric=catalogue.HOST_MEMORY_AVAILABLE,
        when=lambda series, limit: series.value < limit * series.beside(catalogue.HOST_MEMORY),
        limit=0.03,
        for_s=60,
        summary="{host}: {value} bytes of memory available",
        why="when memory runs out, the kernel kills a process, most likely a rank",
        fix="use fewer loader workers, or fewer ranks on this host",
    ),
    Alert(
        name="MusterDiskFull",
        severity="critical",
        metric=catalogue.HOST_DISK_FREE,
        when=lambda series, limit: series.value < limit,
        limit=2e9,
        for_s=60,
        summary="{host}: {value} bytes free on the disk of the runs",
        why="the next checkpoint may not fit",
        fix="muster checkpoint list shows what uses the space",
    ),
)
