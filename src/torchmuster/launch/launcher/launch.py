"""Launch a task with the hosts of a run: its records in the run folder, signals, and the last message."""

import asyncio
import contextlib
import logging
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torchmuster.errors import ExitCode, MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.launch.launcher import restart
from torchmuster.launch.launcher.console import Console, rank_text, show_findings
from torchmuster.launch.launcher.run import JobOutcome, Result
from torchmuster.launch.launcher.stopping import StopSignal, StopSignals
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, name_several

logger = logging.getLogger(__name__)

_READ_WITHIN_S = 10.0


class Task(Protocol):
    """What is done with the hosts: a run (``run.py``) or a check of the group."""

    spec: JobSpec
    run_folder: RunFolder
    token: str

    def stop(self, origin: str) -> None:
        """Request a stop, whose origin is given; a second request stops without a grace period."""

    def pass_on(self, name: str) -> None:
        """Pass a signal on to every rank."""

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        """Run the task to its end; call ``on_phase`` with each phase that it enters."""


def run_task(
    task: Task, console: Console, *, on_phase: Callable[[str], None] = lambda _: None
) -> int:
    """Run a task to its end, with its records in the run folder; return the exit code of the command."""
    _ignore_early_warnings()
    return asyncio.run(_run_with_records(task, console, on_phase))


def _ignore_early_warnings() -> None:
    """Ignore a scheduler's warning signal before and after the ranks run: by default it kills the process.

    This uses a handler because child processes would inherit SIG_IGN.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)  # Windows has none
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: None)


async def _run_with_records(
    task: Task, console: Console, report_phase: Callable[[str], None]
) -> int:
    spec, run = task.spec, task.run_folder
    began_s = time.monotonic()
    shown = spec.typed if is_ours(spec.command) else spec.command
    events = run_state.EventLog(run, command=shown)
    slurm_job = None
    if "SLURM_JOB_ID" in os.environ:
        from torchmuster.launch.schedulers.slurm.allocation import job_id

        slurm_job = job_id(os.environ)
    run_state.write_job(run, spec, token=task.token, slurm_job=slurm_job)
    newest = None if slurm_job is None else await _newest_checkpoint(spec)
    requests = StopSignals(spec, run, stop_task=task.stop, pass_on=task.pass_on)

    def on_phase(name: str) -> None:
        events.phase(name)
        report_phase(name)
        if name == "starting":
            requests.begin_time_limit()

    with console:
        try:
            with run_state.launcher_heartbeat(run.job), requests:
                logger.debug(f"run {run.id}")
                outcome = await task.run(on_phase)
        except MusterError as error:
            findings = from_error(error)
            show_findings(findings)
            events.ended("failed", error.exit_code, error.what, finding=findings[0])
            return error.exit_code
        except asyncio.CancelledError:  # Ctrl-C before the signal handlers were installed
            events.ended("stopped", ExitCode.INTERRUPTED, "stopped on request")
            raise
        except BaseException as error:
            events.ended("failed", ExitCode.FAILED, f"the launcher failed: {error!r}")
            raise
        took_s = time.monotonic() - began_s
        resume = None
        if outcome.result is not Result.FINISHED:
            resume = await _how_to_resume(spec, run)
        code = _conclude(task, outcome, events, took_s, requests.cause)
        if resume is not None:
            show_findings([resume])
        if code == ExitCode.SAVED and slurm_job is not None and not requests.stop_signals:
            from torchmuster.launch.schedulers.slurm.allocation import would_not_get_on

            why_not = would_not_get_on(
                spec,
                saved_new=outcome.saved is not None and outcome.saved.is_new,
                is_newer=await _newest_checkpoint(spec) != newest,
                warned=requests.is_warned,
                took_s=took_s,
            )
            await asyncio.to_thread(_go_back_into_the_queue, slurm_job, why_not)
        if outcome.result is Result.FAILED:
            logger.info(f"failed after {format_seconds(took_s)}; {_explain_command(run)}")
        return code


def _conclude(
    task: Task, outcome: JobOutcome, events: run_state.EventLog, took_s: float, stop: StopSignal
) -> int:
    """Print and log how the run ended; return the exit code."""
    spec, run = task.spec, task.run_folder
    took = format_seconds(took_s)
    killed = outcome.killed.ranks if outcome.killed else ()
    if outcome.killed:
        kill = outcome.killed.finding
        run_state.log_event(run, run_state.RANKS_KILLED, what=kill.what, finding=kill.as_json())
        show_findings([kill])
    match outcome.result:
        case Result.FINISHED:
            events.ended("finished", ExitCode.GOOD, outcome.words or "finished")
            if not outcome.words:
                logger.info(f"finished in {took}; {_where_logs_are(run)}")
            return ExitCode.GOOD
        case Result.SAVED:
            assert outcome.saved is not None
            resume = "rerun the command to resume"  # the user's own script knows how
            if spec.checkpoints is not None:
                resume = f"resume with: muster train --resume {_shown(run.path)}"
            events.ended("saved", ExitCode.SAVED, outcome.saved.text, killed_ranks=killed)
            logger.info(f"{outcome.saved.text}, after {took}; {resume}")
            return ExitCode.SAVED
        case Result.STOPPED:
            not_saved = " without a final checkpoint" if spec.checkpoints else ""
            code = stop.exit_code
            if code == ExitCode.TERMINATED and outcome.killed and not outcome.killed.at_once:
                code = ExitCode.KILLED
            headline = f"stopped on request ({outcome.origin or stop.origin})"
            headline += f"; killed: {rank_text(killed)}" if killed else ""
            events.ended("stopped", code, headline, killed_ranks=killed)
            logger.info(f"stopped after {took}{not_saved}; {_left(outcome.left)}")
            return code
        case Result.FAILED:
            finding = outcome.finding
            headline = outcome.words if finding is None else finding.what
            events.ended("failed", ExitCode.FAILED, headline, finding=finding)
            if finding is not None:
                show_findings([finding])
            return ExitCode.FAILED


async def _how_to_resume(spec: JobSpec, run: RunFolder) -> Finding | None:
    """Return from which checkpoint the user's script can resume; a disk that hangs must not block the end."""

    def read() -> Finding | None:
        from torchmuster.launch.history.resume import plan_resume, resume_finding

        return resume_finding(spec, plan_resume(spec, run.metrics))

    with contextlib.suppress(Exception):
        return await asyncio.wait_for(asyncio.to_thread(read), _READ_WITHIN_S)
    return None


async def _newest_checkpoint(spec: JobSpec) -> str | None:
    metrics = Path()  # what was not saved does not count
    progress = await asyncio.to_thread(
        restart.read_training_progress, spec, metrics, since_unix_s=math.inf
    )
    return progress.checkpoint


def _go_back_into_the_queue(job: str, why_not: str | None) -> None:
    from torchmuster.launch.schedulers.slurm.allocation import requeue

    if why_not is None:  # said before Slurm ends this process for it
        logger.info(f"requeueing job {job}; it resumes when it starts again")
        why_not = requeue(job, os.environ)
    if why_not is not None:
        logger.info(f"job {job} is not requeued: {why_not}")


def _where_logs_are(run: RunFolder) -> str:
    if run.marker.is_file():
        return f"logs in {_shown(run.logs)}"
    return f"{_shown(run.path)} was deleted during the run: the logs and checkpoints in it are lost"


def _left(hosts: Sequence[str]) -> str:
    if not hosts:
        return "all processes have exited"
    return f"no answer from {name_several(hosts)}; the node agent there stops its ranks as soon as it can"


def _explain_command(run: RunFolder) -> str:
    """Return the command that explains a run, as it works in this folder."""
    if run.path.resolve().parent == Path("runs").resolve():
        return "muster explain last"
    return shlex.join(["muster", "explain", _shown(run.path)])


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
