"""``muster stop``: stop a run on all its hosts, and verify that it has stopped."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass

import psutil

from torchmuster.cli import output
from torchmuster.cli.options import WhichRunOptions, argument, command
from torchmuster.cli.which_run import choose_run
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.launch.history import run_state
from torchmuster.launch.node import process_cleanup
from torchmuster.runfolder import RunFolder, refuse_foreign

_SAY_EVERY_S = 5.0
# Time that the launcher may take after the ranks' grace period to stop the other hosts and itself.
_BEYOND_GRACE_S = 15.0
_KILL_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StopOptions(WhichRunOptions):
    """The flags of ``muster stop``."""

    which: str | None = argument(
        "a run's id, a unique part of it, its folder, or: last (default: the active run, if there is only one)",
        metavar="RUN",
    )


@command(
    StopOptions,
    more="""
    Sends SIGTERM to its ranks, which may save a checkpoint; kills them after the run's launch.grace.
    """,
    examples=[
        "muster stop                        the active run in ./runs",
        "muster stop 20260131-1200          a unique part of the run's id",
        "muster stop /data/runs/20260131-120000-train-1a2b",
    ],
)
def run(options: StopOptions) -> int:
    """Stop the run."""
    folder = choose_run(options.which, options.runs, active_first=True, refuse_several=True)
    refuse_foreign(folder, "stop")
    return stop_run(folder)


def stop_run(run: RunFolder) -> int:
    """Stop a run of this user, whose folder was checked; a run that waits for GPUs leaves the line."""
    job, state = run_state.read_job(run), run_state.read_state(run)
    if job is None:
        raise Impossible(
            f"{run.id} was never launched",
            why="its folder does not name a launcher process",
            fix="muster runs  # lists all runs",
        )
    active = state is None or state.active
    process = _own_process(job, run)
    if active and job.slurm_job and not job.launcher.is_of_this_machine:
        from torchmuster.launch.schedulers.slurm.submit import cancel_job

        cancel_job(job.slurm_job)
        output.say(f"muster: {run.id}: cancelled Slurm job {job.slurm_job}")
        return ExitCode.GOOD
    if active and not job.launcher.is_of_this_machine:
        raise Impossible(
            f"{run.id} was launched on {job.launcher.host}",
            why="its launcher runs on that host",
            fix=f"ssh {job.launcher.host} muster stop {run.path.resolve()}",
        )
    if active and process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has exited
            process.send_signal(signal.SIGTERM)
            _await_end(process, run, job.grace_s + _BEYOND_GRACE_S)
    left = []
    if job.token:
        owner = os.geteuid()
        left = process_cleanup.kill_processes(job.token, within_s=_KILL_WITHIN_S, owner=owner)
    if left:
        raise MusterError(
            f"cannot kill processes of {run.id}: {', '.join(str(process.pid) for process in left)}",
            why="they do not react to SIGKILL because they are blocked in a driver or in disk I/O",
            fix="run dmesg to see what they wait for, or reboot the host",
        )
    ended = run_state.read_state(run)
    outcome = "stopped" if ended is None else f"{ended.phase}: {ended.headline}"
    output.say(f"muster: {run.id} {outcome}; none of its processes are left on this host")
    return ExitCode.GOOD


def _own_process(job: run_state.RunJob, run: RunFolder) -> psutil.Process | None:
    """Return the launcher's process; never one of another user, whatever the file says."""
    process = job.launcher.process()
    if process is None:
        return None
    try:
        uid = process.uids().real
    except psutil.Error:
        return None  # it has exited
    if uid != os.geteuid():
        raise Impossible(
            f"refusing to stop {run.id}",
            why=f"{run.job} names process {process.pid}, which belongs to {process.username()}",
            fix="muster runs  # lists all runs",
        )
    return process


def _await_end(process: psutil.Process, run: RunFolder, within_s: float) -> None:
    began = reported_s = time.monotonic()
    killed = False
    # A process that has exited stays a zombie until its parent waits for it.
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        now = time.monotonic()
        if now - began > within_s + _KILL_WITHIN_S:
            return  # SIGKILL did not help: the process cleanup reports what is left
        if now - began > within_s and not killed:
            killed = True
            output.say(
                f"muster: {run.id} did not stop within {within_s:.0f} s; killing its launcher"
            )
            process.kill()
        elif now - reported_s > _SAY_EVERY_S:
            reported_s = now
            output.say(f"muster: waiting for {run.id} to stop ({now - began:.0f} s)")
        time.sleep(0.05)
