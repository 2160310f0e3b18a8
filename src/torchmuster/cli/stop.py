"""``muster stop``: end a run on all its machines, and make sure that it has ended."""

import argparse
import signal
import time

import psutil

from torchmuster.cli import output, parsers
from torchmuster.cli.job_flags import duration
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, find_run

_SAY_EVERY_S = 5.0
# What the launcher may take beyond the ranks' grace to end the other machines and itself.
_BEYOND_GRACE_S = 15.0
_KILL_WITHIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster stop``."""
    parser.description = (
        f"{parser.description}\nIts ranks are asked to end and may save their work; after the run's "
        "--grace they are killed."
    )
    parsers.show_examples(
        parser,
        [
            "muster stop last                   the newest run in ./runs",
            "muster stop 20260131-1200          part of its id is enough",
            "muster stop /data/runs/20260131-120000-train-1a2b",
        ],
    )
    parsers.add_run_argument(parser)
    parser.add_argument(
        "--within",
        type=duration,
        metavar="TIME",
        help="kill what has not ended by then (default: 15s more than the run's --grace)",
    )
    parser.set_defaults(run=_run_stop)


def _run_stop(options: argparse.Namespace) -> int:
    run = find_run(options.which, options.runs)
    job, state = run_state.await_job(run), run_state.read_state(run)
    if job is None:
        raise Impossible(
            f"{run.id} was never launched",
            why="its folder is there, but nothing in it says by which process",
            fix="muster runs  # shows those that were",
        )
    active = state is None or state.active
    process = job.launcher.process()
    if active and job.slurm_job and not job.launcher.is_of_this_machine:
        from torchmuster.launch.schedulers.slurm.submit import cancel_job

        cancel_job(job.slurm_job)
        output.say(f"muster: {run.id}: Slurm was told to cancel job {job.slurm_job}")
        return ExitCode.GOOD
    if active and not job.launcher.is_of_this_machine:
        raise Impossible(
            f"{run.id} was launched on {job.launcher.host}",
            why="its launcher is a process of that machine",
            fix=f"ssh {job.launcher.host} muster stop {run.path.resolve()}",
        )
    if active and process is not None:
        given = job.grace_s + _BEYOND_GRACE_S if options.within is None else options.within
        _end_stop(process, run, given)
    _sweep(run, job)
    now = run_state.read_state(run)
    saved = active and now is not None and now.phase == "saved"
    words = f"has ended: {now.headline}" if saved and now else _how_it_ended(state)
    output.say(f"muster: {run.id} {words}")
    return ExitCode.GOOD


def _how_it_ended(state: run_state.RunState | None) -> str:
    if state is None or state.active:
        return "has ended"
    if state.phase == "died":
        return f"had ended: {state.headline}; nothing of it is left on this machine"
    return f"had ended before: {state.headline}"


def _end_stop(process: psutil.Process, run: RunFolder, within_s: float) -> None:
    try:
        process.send_signal(signal.SIGTERM)
        _await_end(process, run, within_s)
    except psutil.NoSuchProcess:
        return  # which is what was asked for
    except psutil.AccessDenied:
        raise Impossible(
            f"{run.id} is not yours to stop",
            why=f"it was launched by {process.username()}, process {process.pid}",
            fix=f"ask {process.username()}, or as an administrator: sudo muster stop {run.path.resolve()}",
        ) from None


def _await_end(process: psutil.Process, run: RunFolder, within_s: float) -> None:
    began = said = time.monotonic()
    killed = False
    # One that has ended stays as a zombie for as long as whoever started it does not look.
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        now = time.monotonic()
        if now - began > within_s + _KILL_WITHIN_S:
            return  # not even that helped: what is left is told by the sweep
        if now - began > within_s and not killed:
            killed = True
            output.say(
                f"muster: {run.id} did not end within {within_s:.0f} s; killing its launcher"
            )
            process.kill()
        elif now - said > _SAY_EVERY_S:
            said = now
            output.say(f"muster: waiting for {run.id} to end ({now - began:.0f} s)")
        time.sleep(0.05)


def _sweep(run: RunFolder, job: run_state.RunJob) -> None:
    from torchmuster.launch.node import process_cleanup

    left = process_cleanup.kill_processes(job.token, within_s=_KILL_WITHIN_S) if job.token else []
    if left:
        raise MusterError(
            f"processes of {run.id} cannot be ended: {', '.join(str(one.pid) for one in left)}",
            why="they do not react even to SIGKILL: they wait for a driver or a disk",
            fix="see dmesg for what they wait for; a restart of the machine always helps",
        )
