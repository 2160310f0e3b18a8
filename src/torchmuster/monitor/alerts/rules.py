"""All alerts: condition, text and fix."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from torchmuster.monitor import catalogue
from torchmuster.monitor.alerts.expression import Compared, Expression, Now, Over, Spread, While
from torchmuster.monitor.metric import Scope

Severity = Literal["critical", "warning", "info"]
_MINUTE_S = 60.0
RUN_FINISHED = "MusterRunFinished"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert. ``summary`` may contain labels such as ``{run}``, and the measured ``{value}`` or ``{percent}``."""

    name: str
    severity: Severity
    condition: Expression
    for_s: float = 0.0  # how long it must hold before it is raised
    summary: str
    why: str
    fix: str

    def faster(self, times: float) -> Self:
        """Return the alert with all durations divided: the same condition, raised sooner."""
        return replace(self, condition=self.condition.faster(times), for_s=self.for_s / times)


def _in_phase(phase: str) -> Compared:
    return Compared(Now(catalogue.RUN_PHASE, {"phase": phase}), "==", 1)


_RUNNING = _in_phase("running")
_EXPLAIN = "muster explain {run}"

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="MusterStalled",
        severity="critical",
        condition=While(Compared(Now(catalogue.STEP_AGE), ">", 5 * _MINUTE_S), _RUNNING),
        summary="{job}: no step for {value} s (run {run})",
        why="ranks wait for each other or for a disk, or a step or an evaluation takes longer "
        "than 5 minutes",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterLossNotANumber",
        severity="critical",
        # Only NaN differs from itself.
        condition=While(
            Compared(Now(catalogue.LOSS), "!=", 1, times=Now(catalogue.LOSS)), _RUNNING
        ),
        summary="{job}: the loss is NaN (run {run})",
        why="the gradients exploded, or a sample is invalid",
        fix="resume from an earlier checkpoint; lower the learning rate, clip gradients, or use "
        "bf16 "
        "instead of fp16",
    ),
    Alert(
        name="MusterLossSpike",
        severity="warning",
        condition=While(
            Compared(
                Now(catalogue.LOSS), ">", 3, times=Over("median", catalogue.LOSS, 30 * _MINUTE_S)
            ),
            _RUNNING,
        ),
        for_s=2 * _MINUTE_S,
        summary="{job}: the loss is {value}, over 3 times its 30-minute median (run {run})",
        why="bad data, or the learning rate is too high",
        fix="compare with the gradient norm; clip gradients, or resume from an earlier checkpoint",
    ),
    Alert(
        name="MusterSkippedSteps",
        severity="warning",
        condition=While(
            Compared(
                Now(catalogue.SKIPPED_STEPS),
                ">",
                1,
                times=Over("least", catalogue.SKIPPED_STEPS, 10 * _MINUTE_S),
            ),
            _RUNNING,
        ),
        for_s=10 * _MINUTE_S,
        summary="{job}: optimizer steps are skipped, {value} so far (run {run})",
        why="gradients are not finite; occasional skips are normal with fp16 only",
        fix="use bf16 instead of fp16, or lower the learning rate",
    ),
    Alert(
        name="MusterDataStarved",
        severity="warning",
        condition=While(Compared(Now(catalogue.TIME_SHARE, {"part": "data"}), ">", 0.3), _RUNNING),
        for_s=5 * _MINUTE_S,
        summary="{job}: data loading takes {percent} of the time (run {run})",
        why="the data loader is slower than the training step",
        fix="muster bench data finds the best number of loader workers; use faster storage, or "
        "preprocess the data",
    ),
    Alert(
        name="MusterStraggler",
        severity="warning",
        condition=While(Compared(Spread(catalogue.RANK_WAITING, Scope.RUN), ">", 0.2), _RUNNING),
        for_s=5 * _MINUTE_S,
        summary="{job}: straggler: ranks wait up to {percent} of the time for the slowest rank "
        "(run {run})",
        why="one rank is slower than the others: the one with the lowest "
        "muster_rank_communication_ratio",
        fix="muster watch {run} shows the rank; check its host and GPU",
    ),
    Alert(
        name="MusterCheckpointOld",
        severity="warning",
        # Compared with how often this run saves.
        condition=While(
            Compared(
                Now(catalogue.CHECKPOINT_AGE), ">", 3, times=Now(catalogue.CHECKPOINT_INTERVAL)
            ),
            _RUNNING,
        ),
        for_s=5 * _MINUTE_S,
        summary="{job}: no checkpoint for {value} s, over 3 times the usual interval (run {run})",
        why="a failure now would lose all steps since the last checkpoint",
        fix="find out why saving fails: muster explain {run}; or save more often (muster train: "
        "checkpoint.every)",
    ),
    Alert(
        name="MusterGoodputLow",
        severity="warning",
        condition=While(Compared(Now(catalogue.GOODPUT), "<", 0.5), _RUNNING),
        for_s=30 * _MINUTE_S,
        summary="{job}: low goodput: {percent} of the time went into useful steps (run {run})",
        why="restarts, saving, evaluation or waiting take the rest",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterSinkFails",
        severity="warning",
        condition=Compared(Now(catalogue.SINK_FAILING), ">", _MINUTE_S),
        summary="{job}: {sink} has received no metrics of run {run} for {value} s",
        why="the tracker cannot be reached, or the sending process was killed; no metrics are "
        "lost: the run folder has all of them",
        fix="check that the tracker can be reached; sending is retried automatically",
    ),
    Alert(
        name="MusterRanksLost",
        severity="critical",
        # Fewer ranks than before, and not because the run was restarted with fewer.
        condition=While(
            While(
                Compared(
                    Now(catalogue.RUN_RANKS),
                    "<",
                    1,
                    times=Over("most", catalogue.RUN_RANKS, 10 * _MINUTE_S),
                ),
                Compared(Now(catalogue.RUN_RANKS), "<", 1, times=Now(catalogue.RUN_RANKS_STARTED)),
            ),
            _RUNNING,
        ),
        for_s=_MINUTE_S,
        summary="{job}: only {value} ranks send heartbeats (run {run})",
        why="a host or its ranks are lost",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterRunFailed",
        severity="critical",
        condition=_in_phase("failed"),
        summary="{job}: run {run} has failed",
        why="a rank or the launcher failed; the logs of the ranks are in the run folder",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterLauncherDied",
        severity="critical",
        condition=_in_phase("died"),
        summary="{job}: the launcher of run {run} died",
        why="it was killed, or its host is down",
        fix=_EXPLAIN,
    ),
    Alert(
        name=RUN_FINISHED,
        severity="info",
        condition=_in_phase("finished"),
        summary="{job}: run {run} has finished",
        why="",
        fix="muster runs",
    ),
    Alert(
        name="MusterGpuHot",
        severity="warning",
        condition=Compared(
            Now(catalogue.GPU_TEMPERATURE), ">", 0.97, times=Now(catalogue.GPU_SLOWDOWN_TEMPERATURE)
        ),
        for_s=5 * _MINUTE_S,
        summary="{host}: GPU {gpu_uuid} is at {value} °C",
        why="it will throttle soon and slow down all ranks",
        fix="check fans, dust and airflow; lower the power limit",
    ),
    Alert(
        name="MusterGpuThrottled",
        severity="warning",
        condition=Compared(Now(catalogue.GPU_THROTTLED), "==", 1),
        for_s=10 * _MINUTE_S,
        summary="{host}: GPU {gpu_uuid} is throttled ({reason})",
        why="temperature or power limit reached",
        fix="muster doctor explains the reason",
    ),
    Alert(
        name="MusterGpuMemoryErrors",
        severity="critical",
        condition=Compared(Now(catalogue.GPU_ECC, {"kind": "uncorrected"}), ">", 0),
        summary="{host}: GPU {gpu_uuid} has {value} uncorrected memory (ECC) errors",
        why="results may be wrong, and the next error may crash the run",
        fix="reboot the host; if the errors come back, replace the GPU",
    ),
    Alert(
        name="MusterGpuError",
        severity="critical",
        condition=Compared(Now(catalogue.GPU_XID, {"kind": "device"}), ">", 0),
        summary="{host}: the driver reported a critical error on GPU {gpu_uuid} (Xid {xid})",
        why="the GPU, its memory, its links or its firmware failed; programs on it fail or hang",
        fix="sudo dmesg | grep -i xid shows the error; reset the GPU or reboot the host, then "
        "restart "
        "the exporter; if the error comes back, replace the GPU",
    ),
    Alert(
        name="MusterGpuMemoryNearLimit",
        severity="info",
        condition=Compared(
            Now(catalogue.GPU_MEMORY_USED), ">", 0.98, times=Now(catalogue.GPU_MEMORY_USABLE)
        ),
        for_s=5 * _MINUTE_S,
        summary="{host}: the memory of GPU {gpu_uuid} is almost full",
        why="a batch with longer sequences may not fit",
        fix="muster plan shows what reduces memory",
    ),
    Alert(
        name="MusterHostMemoryLow",
        severity="critical",
        condition=Compared(
            Now(catalogue.HOST_MEMORY_AVAILABLE), "<", 0.03, times=Now(catalogue.HOST_MEMORY)
        ),
        for_s=_MINUTE_S,
        summary="{host}: {value} bytes of memory available",
        why="when memory runs out, the kernel kills a process, most likely a rank",
        fix="use fewer loader workers, or fewer ranks on this host",
    ),
    Alert(
        name="MusterDiskFull",
        severity="critical",
        condition=Compared(Now(catalogue.HOST_DISK_FREE), "<", 2e9),
        for_s=_MINUTE_S,
        summary="{host}: {value} bytes free on the disk of the runs",
        why="the next checkpoint may not fit",
        fix="muster checkpoint ls shows what uses the space",
    ),
)
