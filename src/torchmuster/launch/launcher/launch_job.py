"""Launch a job from start to end: run folder, signals, job runner, final message."""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchmuster.errors import ExitCode, MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.network.reach import name_several
from torchmuster.launch.transports.channel import Arrive, Channel, Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

if TYPE_CHECKING:
    from torchmuster.launch.history import run_state
    from torchmuster.launch.launcher.console import TerminalConsole
    from torchmuster.launch.launcher.job_runner import JobOutcome


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
        run_id: str,
        logs: str,
        on_phase: Callable[[str], None],
    ) -> GroupTask:
        """Return the task."""


def launch_job(
    spec: JobSpec,
    transport: Transport,
    run: RunFolder,
    make_voice: Callable[[RunFolder], "TerminalConsole"],
    make_course: MakeGroupTask | None = None,
    *,
    on_phase: Callable[[str], None] = lambda _: None,
) -> int:
    """Launch a job and wait until it is over; return the exit code of the command.

    ``make_course`` creates a task other than a run. ``on_phase`` is called with each phase that the run enters.
    """

    async def work() -> int:
        # Connect the hosts first: node agents start while this process imports what it needs.
        called = _Called(transport)
        await called.call()
        return await _launch(spec, called, run, make_voice(run), make_course, on_phase)

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


class _Called:
    """A transport that connects the hosts before the node registry exists."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._early: list[tuple[int, Channel]] = []
        self._arrive: Arrive = lambda place, channel: self._early.append((place, channel))
        self._failed: MusterError | None = None

    async def call(self) -> None:
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

    async def reopen(self, place: int) -> None:
        """Reconnect a lost host."""
        await self._transport.reopen(place)

    def waiting_for(self, place: int) -> str:
        """Return why a host has not joined yet, as a short text."""
        return self._transport.waiting_for(place)

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a host will not join."""
        return self._transport.gave_up(place)

    def rejoins(self, place: int) -> bool:
        """Return whether a lost host may rejoin by itself."""
        return self._transport.rejoins(place)

    async def close(self) -> None:
        """Close everything that was opened."""
        await self._transport.close()


async def _launch(
    spec: JobSpec,
    transport: Transport,
    run: RunFolder,
    console: "TerminalConsole",
    make_course: MakeGroupTask | None,
    report_phase: Callable[[str], None],
) -> int:
    from torchmuster.launch.history import run_state
    from torchmuster.launch.history.evidence import keep_failure, read_failures
    from torchmuster.launch.history.run_state import launcher_heartbeat_file
    from torchmuster.launch.launcher.job_runner import JobRunner
    from torchmuster.launch.schedulers.slurm.allocation import job_id, would_not_get_on

    began = time.monotonic()
    event_log = run_state.EventLog(run, job_uid=spec.job_uid)
    logs = str(run.logs.resolve())
    make_course = make_course or JobRunner
    asked: list[str] = []

    def end_at_limit() -> None:
        origin = f"time limit of {format_seconds(spec.limits.time_s or 0.0)}"
        console.say(f"{origin} reached: stopping all ranks within {spec.limits.grace_s:g} s")
        run_state.log_event(run, "time-limit", what=f"stop requested ({origin})")
        asked.append("SIGTERM")
        course.stop(origin)

    def on_phase(name: str) -> None:
        event_log.phase(name)
        report_phase(name)
        if name == "starting" and spec.limits.time_s is not None and not limits:
            loop = asyncio.get_running_loop()
            limits.append(loop.call_later(spec.limits.time_s, end_at_limit))

    limits: list[asyncio.TimerHandle] = []
    course = make_course(spec, transport, console, run_id=run.id, logs=logs, on_phase=on_phase)
    slurm_job = job_id(os.environ)
    run_state.write_job(run, spec, token=course.token, slurm_job=slurm_job)
    with console.speaking():
        warned: list[str] = []
        newest = None if slurm_job is None else await _newest_checkpoint(spec)
        try:
            with (
                launcher_heartbeat_file(run.state),
                _signals(course, console, asked, warned, run=run, spec=spec),
            ):
                console.say(f"run {run.id}")  # from here on the user can stop it by this id
                outcome = await course.run()
        except MusterError as error:
            console.show(findings := from_error(error))
            keep_failure(run, len(read_failures(run)), findings[0], ())
            event_log.ended("failed", error.exit_code, error.what)
            return error.exit_code
        except asyncio.CancelledError:  # Ctrl-C before the signal handlers were installed
            event_log.ended("stopped", ExitCode.INTERRUPTED, "stopped on request")
            raise
        except BaseException as error:
            event_log.ended("failed", ExitCode.FAILED, f"the launcher failed: {error!r}")
            raise
        for limit in limits:
            limit.cancel()
        console.finish()
        took_s = time.monotonic() - began
        resume = None if outcome.good else await _how_to_resume(spec, run)
        event_log.resume = resume.fix if resume is not None else ""
        stop = _STOP_SIGNALS[asked[0] if asked else "SIGTERM"]
        code = _conclude(outcome, spec, event_log, console, run, took_s, stop)
        if resume is not None:
            console.show([resume])
        if code == ExitCode.SAVED and slurm_job is not None and not asked:
            is_newer = await _newest_checkpoint(spec) != newest
            why_not = would_not_get_on(
                spec, outcome.saved, is_newer=is_newer, warned=bool(warned), took_s=took_s
            )
            await asyncio.to_thread(_go_back_into_the_queue, slurm_job, console, why_not)
        return code


async def _how_to_resume(spec: JobSpec, run: RunFolder) -> Finding | None:
    """Return from which checkpoint the user's script can resume; a disk that hangs must not block the end."""
    from torchmuster.launch.history.resume import plan_resume, resume_finding

    def look() -> Finding | None:
        return resume_finding(spec, plan_resume(spec, run.metrics))

    with contextlib.suppress(Exception):
        return await asyncio.wait_for(asyncio.to_thread(look), _LOOK_WITHIN_S)
    return None


async def _newest_checkpoint(spec: JobSpec) -> str | None:
    from torchmuster.launch.launcher import training_progress

    metrics = Path()  # what was not saved does not count
    seen = await asyncio.to_thread(
        training_progress.read_training_progress, spec, metrics, since_unix_s=math.inf
    )
    return seen.checkpoint


def _go_back_into_the_queue(job: str, console: "TerminalConsole", why_not: str) -> None:
    from torchmuster.launch.schedulers.slurm.allocation import may_go_back, requeue

    decided = may_go_back(job, os.environ, why_not=why_not)
    console.say(decided.reason)
    if decided.value and (trouble := requeue(job)):
        console.say(trouble)


def _where_logs_are(run: RunFolder) -> str:
    if run.marker.is_file():
        return f"logs in {_launch_job_shown(run.logs)}"
    return f"{_launch_job_shown(run.path)} was deleted during the run: the logs and checkpoints in it are lost"


def _conclude(
    outcome: "JobOutcome",
    spec: JobSpec,
    event_log: "run_state.EventLog",
    console: "TerminalConsole",
    run: RunFolder,
    took_s: float,
    stop: _StopSignal,
) -> int:
    from torchmuster.launch.history import run_state
    from torchmuster.launch.launcher.console import rank_text

    took = format_seconds(took_s)
    killed = outcome.killed.ranks if outcome.killed else ()
    if outcome.killed:
        console.show([finding := outcome.killed.finding])
        run_state.log_event(run, finding.name, what=finding.what, why=finding.why, fix=finding.fix)
    if outcome.good and outcome.words:
        event_log.ended("finished", ExitCode.GOOD, outcome.words)
        return ExitCode.GOOD
    if outcome.good:
        console.say(f"finished in {took}; {_where_logs_are(run)}")
        event_log.ended("finished", ExitCode.GOOD, "finished")
        return ExitCode.GOOD
    if outcome.saved:
        console.say(f"{outcome.saved}, after {took}; {_how_to_go_on(spec, run)}")
        event_log.ended("saved", ExitCode.SAVED, outcome.saved, killed_ranks=killed)
        return ExitCode.SAVED
    if outcome.stopped:
        not_saved = " without a final checkpoint" if spec.checkpoints else ""
        console.say(f"stopped after {took}{not_saved}; {_left(outcome.left)}")
        code = stop.exit_code
        if code == ExitCode.TERMINATED and outcome.killed and not outcome.killed.at_once:
            code = ExitCode.KILLED
        headline = f"stopped on request ({outcome.origin or stop.origin})"
        headline += f"; killed: {rank_text(killed)}" if killed else ""
        event_log.ended("stopped", code, headline, killed_ranks=killed)
        return code
    if outcome.words:
        event_log.ended("failed", ExitCode.FAILED, outcome.words)
        return ExitCode.FAILED
    assert outcome.finding is not None
    console.show([outcome.finding])
    event_log.ended("failed", ExitCode.FAILED, outcome.finding.what)
    return ExitCode.FAILED


def _how_to_go_on(spec: JobSpec, run: RunFolder) -> str:
    if spec.checkpoints is None:  # the user's own script, which knows how to resume
        return "rerun the command to resume"
    return f"resume with: muster train --resume {_launch_job_shown(run.path)}"


def _left(machines: Sequence[str]) -> str:
    if not machines:
        return "all processes have exited"
    return f"no answer from {name_several(machines)}; the node agent there stops its ranks as soon as it can"


def _launch_job_shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


@contextlib.contextmanager
def _signals(
    course: GroupTask,
    console: "TerminalConsole",
    asked: list[str],
    warned: list[str],
    *,
    run: RunFolder,
    spec: JobSpec,
) -> Iterator[None]:
    """Turn signals into requests while the run lasts.

    ``asked`` collects the signals that requested a stop, ``warned`` the warning signals.
    """
    from torchmuster.launch.history import run_state

    loop = asyncio.get_running_loop()
    reminder: asyncio.TimerHandle | None = None
    last_s = -math.inf

    def stop(name: str) -> None:
        nonlocal last_s
        again_s, last_s = loop.time() - last_s, loop.time()
        if again_s <= _SAME_REQUEST_S and name != "SIGINT":
            return
        origin = _STOP_SIGNALS[name].origin
        within = f"within {spec.limits.grace_s:g} s"
        words = f"stop requested ({origin}): stopping all ranks {within} (repeat to kill them immediately)"
        if asked:
            words = f"stop requested again ({origin}): killing all ranks"
        asked.append(name)
        console.say(words)
        run_state.log_event(run, "stop-requested", what=f"stop requested ({origin})")
        course.stop(origin)

    def warn(name: str) -> None:
        nonlocal reminder
        warned.append(name)
        course.pass_on(name)
        if (
            spec.checkpoints is not None
        ):  # repeat it for ranks that are still starting and missed the first one
            reminder = loop.call_later(_REMIND_AFTER_S, warn, name)

    def suspend() -> None:
        console.say(
            "a run cannot be suspended; to free the terminal use --detach and muster logs -f"
        )

    actions = {"SIGINT": stop, "SIGTERM": stop, "SIGUSR1": warn, "SIGUSR2": warn}
    known: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for name, action in actions.items():
        with contextlib.suppress(AttributeError, NotImplementedError):
            number = getattr(signal, name)
            loop.add_signal_handler(number, action, name)
            known.append(number)
    with contextlib.suppress(AttributeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGTSTP, suspend)
        known.append(signal.SIGTSTP)
        # With nohup or --detach, a hangup does nothing.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, stop, "SIGHUP")
            known.append(signal.SIGHUP)
    try:
        yield
    finally:
        if reminder is not None:
            reminder.cancel()
        for number in known:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
