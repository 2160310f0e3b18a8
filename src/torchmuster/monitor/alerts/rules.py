"""Every alert of the product: when it is raised, what it says, what to do."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from torchmuster.monitor import catalogue
from torchmuster.monitor.alerts.expression import Compared, Expression, Now, Over, Spread, While
from torchmuster.monitor.metric import Scope

Severity = Literal["critical", "warning", "info"]
_MINUTE_S, _HOUR_S = 60.0, 3600.0


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert. ``summary`` may name labels as ``{run}``, and what was seen as ``{value}``."""

    name: str
    severity: Severity
    condition: Expression
    for_s: float = 0.0  # that it must hold before anybody is told
    summary: str
    why: str
    fix: str

    def faster(self, times: float) -> Self:
        """Return it with all times divided: it is raised sooner, by the same condition."""
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
        why="ranks wait for each other or for a disk, or a step or an evaluation takes longer than five minutes",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterLossNotANumber",
        severity="critical",
        # Only what is not a number differs from itself.
        condition=While(
            Compared(Now(catalogue.LOSS), "!=", 1, times=Now(catalogue.LOSS)), _RUNNING
        ),
        summary="{job}: the loss is not a number (run {run})",
        why="gradients have grown without bound, or a sample is bad",
        fix="go back to a checkpoint from before; a lower learning rate, clipped gradients, bf16 instead of fp16",
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
        summary="{job}: the loss is {value}, three times what it was (run {run})",
        why="a bad part of the data, or a learning rate that is too high",
        fix="look at the gradient norm beside it; clip gradients, or go back to a checkpoint",
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
        summary="{job}: steps are being skipped, {value} so far (run {run})",
        why="gradients are not finite: with fp16 now and then, with other types never",
        fix="bf16 instead of fp16, or a lower learning rate",
    ),
    Alert(
        name="MusterDataStarved",
        severity="warning",
        condition=While(Compared(Now(catalogue.TIME_SHARE, {"part": "data"}), ">", 0.3), _RUNNING),
        for_s=5 * _MINUTE_S,
        summary="{job}: waits for data {value} of the time (run {run})",
        why="samples are read more slowly than they are trained on",
        fix="muster bench data finds the number of loader workers; faster storage, or data prepared beforehand",
    ),
    Alert(
        name="MusterStraggler",
        severity="warning",
        condition=While(Compared(Spread(catalogue.RANK_WAITING, Scope.RUN), ">", 0.2), _RUNNING),
        for_s=5 * _MINUTE_S,
        summary="{job}: ranks wait for one among them, up to {value} of the time (run {run})",
        why="one rank is slower than the others: it is the one with the lowest muster_rank_communication_ratio",
        fix="muster watch {run} shows which; look at its machine and its GPU",
    ),
    Alert(
        name="MusterCheckpointOld",
        severity="warning",
        condition=While(Compared(Now(catalogue.CHECKPOINT_AGE), ">", 3 * _HOUR_S), _RUNNING),
        summary="{job}: the newest checkpoint is {value} s old (run {run})",
        why="what was trained since would be lost with the run",
        fix="save more often (checkpoint.every), or see why saving fails: muster explain {run}",
    ),
    Alert(
        name="MusterGoodputLow",
        severity="warning",
        condition=While(Compared(Now(catalogue.GOODPUT), "<", 0.5), _RUNNING),
        for_s=30 * _MINUTE_S,
        summary="{job}: only {value} of its time went into steps that count (run {run})",
        why="restarts, saving, evaluation or waiting take the rest",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterSinkFails",
        severity="warning",
        condition=Compared(Now(catalogue.SINK_FAILING), ">", _MINUTE_S),
        summary="{job}: {sink} has not got the numbers of run {run} for {value} s",
        why="it cannot be reached, or the process that sends them was ended; the run's folder has them all",
        fix="it is tried again and again; after the run: muster runs export {run} --to {sink}",
    ),
    Alert(
        name="MusterRanksLost",
        severity="critical",
        # Fewer than there were, and not because somebody has gone on with fewer.
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
        summary="{job}: only {value} ranks are heard of (run {run})",
        why="a machine is gone, or its ranks are",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterRunFailed",
        severity="critical",
        condition=_in_phase("failed"),
        summary="{job}: run {run} has failed",
        why="its last words are in its folder",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterLauncherDied",
        severity="critical",
        condition=_in_phase("died"),
        summary="{job}: the launcher of run {run} is gone",
        why="it was killed, or its machine is down",
        fix=_EXPLAIN,
    ),
    Alert(
        name="MusterRunFinished",
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
        summary="{host}: {gpu_uuid} is at {value} degrees",
        why="it slows itself down soon, and all ranks with it",
        fix="look at its fans, its dust and its neighbours; lower its power limit",
    ),
    Alert(
        name="MusterGpuThrottled",
        severity="warning",
        condition=Compared(Now(catalogue.GPU_THROTTLED), "==", 1),
        for_s=10 * _MINUTE_S,
        summary="{host}: {gpu_uuid} slows itself down ({reason})",
        why="heat, or more power than it may draw",
        fix="muster doctor says what the reason means",
    ),
    Alert(
        name="MusterGpuMemoryErrors",
        severity="critical",
        condition=Compared(Now(catalogue.GPU_ECC, {"kind": "uncorrected"}), ">", 0),
        summary="{host}: {gpu_uuid} has had {value} memory errors that could not be corrected",
        why="results may be wrong, and the next one may end the run",
        fix="restart the machine; if they come again, have the card replaced",
    ),
    Alert(
        name="MusterGpuError",
        severity="critical",
        condition=Compared(Now(catalogue.GPU_XID, {"kind": "device"}), ">", 0),
        summary="{host}: the driver has reported a critical error of {gpu_uuid} (Xid {xid})",
        why="the card, its memory, its links or its firmware failed; programs on it fail or hang",
        fix="sudo dmesg | grep -i xid says what; reset the card or restart the machine, then the exporter; "
        "if it comes again, have the card replaced",
    ),
    Alert(
        name="MusterGpuMemoryNearLimit",
        severity="info",
        condition=Compared(
            Now(catalogue.GPU_MEMORY_USED), ">", 0.98, times=Now(catalogue.GPU_MEMORY_USABLE)
        ),
        for_s=5 * _MINUTE_S,
        summary="{host}: the memory of {gpu_uuid} is all but full",
        why="the next longer batch may not fit",
        fix="muster plan says what would make room",
    ),
    Alert(
        name="MusterHostMemoryLow",
        severity="critical",
        condition=Compared(
            Now(catalogue.HOST_MEMORY_AVAILABLE), "<", 0.03, times=Now(catalogue.HOST_MEMORY)
        ),
        for_s=_MINUTE_S,
        summary="{host}: {value} bytes of memory are left",
        why="the system ends a process when there is none, most likely a rank",
        fix="fewer loader workers, or fewer ranks on this machine",
    ),
    Alert(
        name="MusterDiskFull",
        severity="critical",
        condition=Compared(Now(catalogue.HOST_DISK_FREE), "<", 2e9),
        for_s=_MINUTE_S,
        summary="{host}: {value} bytes are left on the disk of the runs",
        why="the next checkpoint may not be written",
        fix="muster checkpoint list shows what takes room",
    ),
)
