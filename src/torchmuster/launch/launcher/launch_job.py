"""Launch a job from start to end: run folder, signals, job runner, final message."""

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
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchmuster.errors import ExitCode, MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch.job import JobSpec
from torchmuster.launch.network.reach import name_several
from torchmuster.launch.transports.channel import Arrive, Channel, Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

if TYPE_CHECKING:
    from torchmuster.launch.history import run_state
    from torchmuster.launch.launcher.console import TerminalConsole
    from torchmuster.launch.launcher.job_runner import JobOutcome

logger = logging.getLogger(__name__)

# Schedulers signal every process of a job, and a shell whose terminal closes hangs up its jobs after the system
# did, so one request may arrive more than once.
_SAME_REQUEST_S = 0.5
_REMIND_AFTER_S = 2.0
_LOOK_WITHIN_S = 10.0


class _StopSignal(NamedTuple):
    origin: str
    exit_code: ExitCode


_STOP_SIGNALS = {
    "SIGINT": _StopSignal("Ctrl-C", ExitCode.INTERRUPTED),
    "SIGTERM": _StopSignal("SIGTERM to the launcher", ExitCode.TERMINATED),
    "SIGHUP": _StopSignal("terminal closed", ExitCode.TERMINATED),
}


class GroupTask(Protocol):
    """The task for the hosts: a run (``JobRunner``) or a check of the group."""

    token: str

    @property
    def stop(self) -> Callable[[str], None]:
        """Request a stop and give its origin; a second request stops without a grace period."""

    @property
    def pass_on(self) -> Callable[[str], None]:
        """Pass a signal on to every rank."""

    async def run(self) -> "JobOutcome":
        """Run the task to its end."""


class MakeGroupTask(Protocol):
    """Create a task once the transport has begun to connect the hosts."""

    def __call__(
        self,
        spec: JobSpec,
        transport: Transport,
        console: "TerminalConsole",
        *,
        run: RunFolder,
        on_phase: Callable[[str], None],
    ) -> GroupTask:
        """Return the task."""


def launch_job(
    spec: JobSpec,
    transport: Transport,
    run: RunFolder,
    make_console: Callable[[RunFolder], "TerminalConsole"],
    make_task: MakeGroupTask | None = None,
    *,
    on_phase: Callable[[str], None] = lambda _: None,
) -> int:
    """Launch a job and wait until it is over; return the exit code of the command.

    ``make_task`` creates a task other than a run. ``on_phase`` is called with each phase that the run enters.
    """

    async def work() -> int:
        # Connect the hosts first: node agents start while this process imports what it needs.
        opened = _OpenTransport(transport)
        await opened.connect()
        return await _Launch(spec, run, make_console(run), on_phase).run(opened, make_task)

    _ignore_early_warnings()
    return asyncio.run(work())


def _ignore_early_warnings() -> None:
    """Ignore a scheduler's warning signal before and after the ranks run: by default it kills the process.

    This uses a handler because child processes would inherit SIG_IGN.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)  # Windows has none
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: None)


class _OpenTransport:
    """A transport that connects the hosts before anybody is there to receive them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._early: list[tuple[int, Channel]] = []
        self._arrive: Arrive = lambda place, channel: self._early.append((place, channel))
        self._failed: MusterError | None = None
        self.reopen = transport.reopen
        self.waiting_for = transport.waiting_for
        self.gave_up = transport.gave_up
        self.rejoins = transport.rejoins
        self.close = transport.close

    async def connect(self) -> None:
        """Connect the hosts; ``open`` raises the error if that fails."""
        try:
            await self._transport.open(lambda place, channel: self._arrive(place, channel))
        except MusterError as error:
            self._failed = error

    @property
    def places(self) -> Sequence[str]:
        """The expected hosts."""
        return self._transport.places

    async def open(self, arrive: Arrive) -> None:
        """Pass on the hosts that are already connected, and then all others."""
        if self._failed is not None:
            raise self._failed
        self._arrive = arrive
        for place, channel in self._early:
            arrive(place, channel)


class _Requests:
    """The signals that arrive while a run lasts, as requests to its task, and its time limit.

    Use as a context: at its end, every signal does again what it did before.
    """

    def __init__(self, spec: JobSpec, run: RunFolder, task: GroupTask) -> None:
        self._spec = spec
        self._run = run
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._last_s = -math.inf
        self._reminder: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._handled: dict[int, object] = {}  # the signals, and what they did before
        self.stop_signals: list[str] = []  # requests to stop
        self.is_warned = False

    @property
    def cause(self) -> _StopSignal:
        """What the first request was."""
        return _STOP_SIGNALS[self.stop_signals[0] if self.stop_signals else "SIGTERM"]

    def __enter__(self) -> "_Requests":
        self._handle("SIGINT", self.stop, "SIGINT")
        self._handle("SIGTERM", self.stop, "SIGTERM")
        self._handle("SIGUSR1", self.warn, "SIGUSR1")
        self._handle("SIGUSR2", self.warn, "SIGUSR2")
        self._handle("SIGTSTP", self._refuse_to_suspend)
        # With nohup or --detach, a hangup does nothing.
        if signal.getsignal(getattr(signal, "SIGHUP", signal.SIGTERM)) is not signal.SIG_IGN:
            self._handle("SIGHUP", self.stop, "SIGHUP")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for timer in (self._reminder, self._limit):
            if timer is not None:
                timer.cancel()
        for number, before in self._handled.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before)  # type: ignore[arg-type]

    def _handle(self, name: str, action: Callable[..., None], *arguments: str) -> None:
        with contextlib.suppress(AttributeError, NotImplementedError):  # Windows
            number = getattr(signal, name)
            before = signal.getsignal(number)
            self._loop.add_signal_handler(number, action, *arguments)
            self._handled[number] = before

    def stop(self, name: str) -> None:
        """Ask the ranks to stop; a second request kills them."""
        again_s = self._loop.time() - self._last_s
        self._last_s = self._loop.time()
        if again_s <= _SAME_REQUEST_S and name != "SIGINT":
            return
        origin = _STOP_SIGNALS[name].origin
        within = f"within {self._spec.limits.grace_s:g} s"
        text = f"stop requested ({origin}): stopping all ranks {within} (repeat to kill them immediately)"
        if self.stop_signals:
            text = f"stop requested again ({origin}): killing all ranks"
        self._request_stop(name, origin, "stop-requested", text)

    def warn(self, name: str) -> None:
        """Pass a scheduler's warning on, again and again: ranks that are still starting miss the first one."""
        self.is_warned = True
        self._task.pass_on(name)
        if self._spec.checkpoints is not None:
            if self._reminder is not None:
                self._reminder.cancel()
            self._reminder = self._loop.call_later(_REMIND_AFTER_S, self.warn, name)

    def begin_time_limit(self) -> None:
        """Let the time limit begin, once."""
        if self._spec.limits.time_s is not None and self._limit is None:
            self._limit = self._loop.call_later(self._spec.limits.time_s, self._end_at_limit)

    def _end_at_limit(self) -> None:
        origin = f"time limit of {format_seconds(self._spec.limits.time_s or 0.0)}"
        grace_s = self._spec.limits.grace_s
        text = f"{origin} reached: stopping all ranks within {grace_s:g} s"
        self._request_stop("SIGTERM", origin, "time-limit", text)

    def _request_stop(self, name: str, origin: str, event: str, text: str) -> None:
        from torchmuster.launch.history import run_state

        self.stop_signals.append(name)
        run_state.log_event(self._run, event, what=f"stop requested ({origin})")
        logger.info(text)
        self._task.stop(origin)

    def _refuse_to_suspend(self) -> None:
        logger.info(
            "a run cannot be suspended; to free the terminal use --detach and muster logs -f"
        )


class _Launch:
    """One launch: its records in the run folder, and its last line."""

    def __init__(
        self,
        spec: JobSpec,
        run: RunFolder,
        console: "TerminalConsole",
        report_phase: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._run = run
        self._console = console
        self._report_phase = report_phase
        self._requests: _Requests | None = None
        self._event_log: run_state.EventLog

    async def run(self, transport: Transport, make_task: MakeGroupTask | None) -> int:
        """Run the task to its end; return the exit code."""
        from torchmuster.launch.history import evidence, run_state
        from torchmuster.launch.launcher.console import logging_to, show_findings
        from torchmuster.launch.launcher.job_runner import JobRunner, Result
        from torchmuster.launch.schedulers.slurm.allocation import job_id, would_not_get_on

        spec, run = self._spec, self._run
        began_s = time.monotonic()
        self._event_log = event_log = run_state.EventLog(run, job_uid=spec.job_uid)
        make_task = make_task or JobRunner
        task = make_task(spec, transport, self._console, run=run, on_phase=self._on_phase)
        slurm_job = job_id(os.environ)
        run_state.write_job(run, spec, token=task.token, slurm_job=slurm_job)
        newest = None if slurm_job is None else await _newest_checkpoint(spec)
        with self._console.speaking(), logging_to(self._console):
            requests = self._requests = _Requests(spec, run, task)
            try:
                with run_state.launcher_heartbeat_file(run.state), requests:
                    logger.debug(f"run {run.id}")
                    outcome = await task.run()
            except MusterError as error:
                findings = from_error(error)
                show_findings(findings)
                failures = len(evidence.read_failures(run))
                evidence.keep_failure(run, failures, findings[0], ())
                event_log.ended("failed", error.exit_code, error.what)
                return error.exit_code
            except asyncio.CancelledError:  # Ctrl-C before the signal handlers were installed
                event_log.ended("stopped", ExitCode.INTERRUPTED, "stopped on request")
                raise
            except BaseException as error:
                event_log.ended("failed", ExitCode.FAILED, f"the launcher failed: {error!r}")
                raise
            self._console.finish()
            took_s = time.monotonic() - began_s
            resume = None
            if outcome.result is not Result.FINISHED:
                resume = await _how_to_resume(spec, run)
                event_log.resume = resume.fix if resume is not None else ""
            code = self._conclude(outcome, took_s, requests.cause)
            if resume is not None:
                show_findings([resume])
            if code == ExitCode.SAVED and slurm_job is not None and not requests.stop_signals:
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

    def _on_phase(self, name: str) -> None:
        self._event_log.phase(name)
        self._report_phase(name)
        if name == "starting" and self._requests is not None:
            self._requests.begin_time_limit()

    def _conclude(self, outcome: "JobOutcome", took_s: float, stop: _StopSignal) -> int:
        """Print and log how the run ended; return the exit code."""
        from torchmuster.launch.history import run_state
        from torchmuster.launch.launcher.console import rank_text, show_findings
        from torchmuster.launch.launcher.job_runner import Result

        run, ended = self._run, self._event_log.ended
        took = format_seconds(took_s)
        killed = outcome.killed.ranks if outcome.killed else ()
        if outcome.killed:
            kill = outcome.killed.finding
            run_state.log_event(run, kill.name, what=kill.what, why=kill.why, fix=kill.fix)
            show_findings([kill])
        match outcome.result:
            case Result.FINISHED:
                ended("finished", ExitCode.GOOD, outcome.words or "finished")
                if not outcome.words:
                    logger.info(f"finished in {took}; {_where_logs_are(run)}")
                return ExitCode.GOOD
            case Result.SAVED:
                assert outcome.saved is not None
                resume = "rerun the command to resume"  # the user's own script knows how
                if self._spec.checkpoints is not None:
                    resume = f"resume with: muster train --resume {_shown(run.path)}"
                ended("saved", ExitCode.SAVED, outcome.saved.text, killed_ranks=killed)
                logger.info(f"{outcome.saved.text}, after {took}; {resume}")
                return ExitCode.SAVED
            case Result.STOPPED:
                not_saved = " without a final checkpoint" if self._spec.checkpoints else ""
                code = stop.exit_code
                if code == ExitCode.TERMINATED and outcome.killed and not outcome.killed.at_once:
                    code = ExitCode.KILLED
                headline = f"stopped on request ({outcome.origin or stop.origin})"
                headline += f"; killed: {rank_text(killed)}" if killed else ""
                ended("stopped", code, headline, killed_ranks=killed)
                logger.info(f"stopped after {took}{not_saved}; {_left(outcome.left)}")
                return code
            case Result.FAILED:
                finding = outcome.finding
                ended("failed", ExitCode.FAILED, outcome.words if finding is None else finding.what)
                if finding is not None:
                    show_findings([finding])
                return ExitCode.FAILED


async def _how_to_resume(spec: JobSpec, run: RunFolder) -> Finding | None:
    """Return from which checkpoint the user's script can resume; a disk that hangs must not block the end."""
    from torchmuster.launch.history.resume import plan_resume, resume_finding

    def read() -> Finding | None:
        return resume_finding(spec, plan_resume(spec, run.metrics))

    with contextlib.suppress(Exception):
        return await asyncio.wait_for(asyncio.to_thread(read), _LOOK_WITHIN_S)
    return None


async def _newest_checkpoint(spec: JobSpec) -> str | None:
    from torchmuster.launch.launcher import training_progress

    metrics = Path()  # what was not saved does not count
    progress = await asyncio.to_thread(
        training_progress.read_training_progress, spec, metrics, since_unix_s=math.inf
    )
    return progress.checkpoint


def _go_back_into_the_queue(job: str, why_not: str | None) -> None:
    from torchmuster.launch.schedulers.slurm.allocation import may_go_back, requeue

    decided = may_go_back(job, os.environ, why_not=why_not)
    logger.info(decided.reason)
    trouble = requeue(job) if decided.value else None
    if trouble is not None:
        logger.info(trouble)


def _where_logs_are(run: RunFolder) -> str:
    if run.marker.is_file():
        return f"logs in {_shown(run.logs)}"
    return f"{_shown(run.path)} was deleted during the run: the logs and checkpoints in it are lost"


def _left(machines: Sequence[str]) -> str:
    if not machines:
        return "all processes have exited"
    return f"no answer from {name_several(machines)}; the node agent there stops its ranks as soon as it can"


def _explain_command(run: RunFolder) -> str:
    """Return the command that explains a run, as it works in this folder."""
    if run.path.resolve().parent == Path("runs").resolve():
        return "muster explain last"
    return shlex.join(["muster", "explain", _shown(run.path)])


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
