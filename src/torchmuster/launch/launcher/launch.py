"""Launch a task with the hosts of a run: its records in the run folder, signals, and the last message."""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchmuster.errors import ExitCode, MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch.history import run_state
from torchmuster.launch.job import is_ours
from torchmuster.launch.launcher import restart
from torchmuster.launch.launcher.console import Console, show_findings
from torchmuster.launch.launcher.run import JobOutcome, Result
from torchmuster.launch.launcher.stopping import StopSignal, StopSignals, Task
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds, name_several

if TYPE_CHECKING:
    from torchmuster.launch.launcher.webhook import Webhook

logger = logging.getLogger(__name__)

_READ_WITHIN_S = 10.0


class RunnableTask(Task, Protocol):
    """A task that can be run."""

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        """Run the task to its end; call ``on_phase`` with each phase that it enters."""


def run_task(task: RunnableTask, console: Console, *, webhook: "Webhook | None" = None) -> int:
    """Run a task to its end, with its records in the run folder; return the exit code of the command."""
    number = getattr(signal, "SIGUSR1", None)  # Windows has none
    if number is not None and signal.getsignal(number) is signal.SIG_DFL:
        # By default a scheduler's warning kills this process before and after the ranks run. Child processes would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    return asyncio.run(_Launch(task, webhook).run(console))


class _Launch:
    """One run of a task: its phases and its end go to the run folder and to the webhook."""

    def __init__(self, task: RunnableTask, webhook: "Webhook | None") -> None:
        self._task = task
        self._spec = task.spec
        self._folder = task.run_folder
        self._webhook = webhook
        self._is_announced = False
        self._began_s = time.monotonic()
        command = self._spec.typed if is_ours(self._spec.command) else self._spec.command
        self._events = run_state.EventLog(self._folder, command=command)
        self._slurm_job: str | None = None
        if "SLURM_JOB_ID" in os.environ:
            from torchmuster.launch.schedulers.slurm.allocation import job_id

            self._slurm_job = job_id(os.environ)
        run_state.write_job(self._folder, self._spec, token=task.token, slurm_job=self._slurm_job)

    async def run(self, console: Console) -> int:
        task = self._task
        self._requests = StopSignals(task)
        with console:
            try:
                with run_state.launcher_heartbeat(self._folder.job), self._requests:
                    logger.debug(f"run {self._folder.id}")
                    newest = await self._newest_checkpoint()
                    outcome = await task.run(self._on_phase)
            except MusterError as error:
                findings = from_error(error)
                show_findings(findings)
                return self._ended("failed", error.exit_code, error.what, finding=findings[0])
            except asyncio.CancelledError:  # Ctrl-C before the signal handlers were installed
                self._ended("stopped", ExitCode.INTERRUPTED, "stopped on request")
                raise
            except BaseException as error:
                self._ended("failed", ExitCode.FAILED, f"the launcher failed: {error!r}")
                raise
            resume = None
            if outcome.result is not Result.FINISHED:
                resume = await self._how_to_resume()
            code = self._conclude(outcome, self._requests.cause)
            if resume is not None:
                show_findings([resume])
            if code == ExitCode.SAVED and not self._requests.stop_signals:
                await self._requeue(outcome, is_newer=await self._newest_checkpoint() != newest)
            if outcome.result is Result.FAILED:
                took = format_seconds(self._took_s)
                logger.info(f"failed after {took}; {_explain_command(self._folder)}")
            return code

    @property
    def _took_s(self) -> float:
        return time.monotonic() - self._began_s

    def _on_phase(self, name: str) -> None:
        self._events.phase(name)
        if name == "starting":
            self._requests.begin_time_limit()
        if name == "running" and self._webhook is not None and not self._is_announced:
            self._is_announced = True
            self._webhook.post("started", "started")

    def _ended(
        self,
        phase: str,
        code: int,
        headline: str,
        *,
        finding: Finding | None = None,
        killed: tuple[int, ...] = (),
    ) -> int:
        self._events.ended(phase, code, headline, finding=finding, killed_ranks=killed)
        if self._webhook is not None:
            self._webhook.post("ended", headline, phase=phase, exit_code=code)
        return code

    def _conclude(self, outcome: JobOutcome, stop: StopSignal) -> int:
        """Print and log how the run ended; return the exit code."""
        took = format_seconds(self._took_s)
        code = outcome.exit_code
        killed: tuple[int, ...] = ()
        if outcome.killed is not None:
            killed = outcome.killed.ranks
            finding = outcome.killed.finding
            run_state.log_event(
                self._folder,
                run_state.RANKS_KILLED,
                what=finding.what,
                finding=finding.as_json(),
            )
            show_findings([finding])
        line = ""
        match outcome.result:
            case Result.FINISHED:
                line = f"finished in {took}; {_where_logs_are(self._folder)}"
            case Result.SAVED:
                resume = "rerun the command to resume"  # the user's own script knows how
                if self._spec.checkpoints is not None:
                    resume = f"resume with: muster train --resume {_shown(self._folder.path)}"
                line = f"{outcome.headline}, after {took}; {resume}"
            case Result.STOPPED:
                code = stop.exit_code
                if outcome.killed and not outcome.killed.at_once and code == ExitCode.TERMINATED:
                    code = ExitCode.KILLED
                not_saved = " without a final checkpoint" if self._spec.checkpoints else ""
                left = "all processes have exited"
                if outcome.left:
                    left = f"no answer from {name_several(outcome.left)}; the node agent there stops its ranks as soon as it can"
                line = f"stopped after {took}{not_saved}; {left}"
        self._ended(
            outcome.result.value, code, outcome.headline, finding=outcome.finding, killed=killed
        )
        if outcome.finding is not None:
            show_findings([outcome.finding])
        elif line and not outcome.is_reported:
            logger.info(line)
        return code

    async def _how_to_resume(self) -> Finding | None:
        """Return from which checkpoint the user's script can resume; a disk that hangs must not block the end."""

        def read() -> Finding | None:
            from torchmuster.launch.history.resume import plan_resume, resume_finding

            return resume_finding(self._spec, plan_resume(self._spec, self._folder.metrics))

        with contextlib.suppress(Exception):
            return await asyncio.wait_for(asyncio.to_thread(read), _READ_WITHIN_S)
        return None

    # ---- in a Slurm job

    async def _newest_checkpoint(self) -> str | None:
        """Return the newest checkpoint of ``muster train``, in a Slurm job; None if there is none, or the storage hangs."""
        if self._slurm_job is None or self._spec.checkpoints is None:
            return None
        reading = asyncio.to_thread(
            restart.read_training_progress,
            self._spec,
            self._folder.metrics,
            restart.TrainingProgress(),
        )
        with contextlib.suppress(TimeoutError):
            return (await asyncio.wait_for(reading, _READ_WITHIN_S)).checkpoint
        return None

    async def _requeue(self, outcome: JobOutcome, *, is_newer: bool) -> None:
        """Requeue the Slurm job of a run that saved, if it gets on."""
        if self._slurm_job is None:
            return
        from torchmuster.launch.schedulers.slurm import allocation

        why_not = allocation.would_not_get_on(
            self._spec,
            saved_new=outcome.saved is not None and outcome.saved.is_new,
            is_newer=is_newer,
            warned=self._requests.is_warned,
            took_s=self._took_s,
        )
        if why_not is None:  # said before Slurm ends this process for it
            logger.info(f"requeueing job {self._slurm_job}; it resumes when it starts again")
            why_not = await asyncio.to_thread(allocation.requeue, self._slurm_job)
        if why_not is not None:
            logger.info(f"job {self._slurm_job} is not requeued: {why_not}")


def _where_logs_are(run: RunFolder) -> str:
    if run.marker.is_file():
        return f"logs in {_shown(run.logs)}"
    return f"{_shown(run.path)} was deleted during the run: the logs and checkpoints in it are lost"


def _explain_command(run: RunFolder) -> str:
    """Return the command that explains a run, as it works in this folder."""
    if run.path.resolve().parent == Path("runs").resolve():
        return "muster explain last"
    return shlex.join(["muster", "explain", _shown(run.path)])


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
