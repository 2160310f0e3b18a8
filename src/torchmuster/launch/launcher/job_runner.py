"""Run a job from the node registry to its end, and restart it after failures if configured."""

import asyncio
import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from torchmuster.decision import Decision
from torchmuster.errors import ExitCode, Impossible, MachineLost, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.history.resume import ResumePlan, restart_text
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.launch.launcher import node_handle, stopping, training_progress
from torchmuster.launch.launcher.node_handle import NodeHandle, Stopped
from torchmuster.launch.launcher.node_registry import NodeRegistry
from torchmuster.launch.launcher.session import Console, Session
from torchmuster.launch.launcher.spares import Examine, SparePool, broken_hosts
from torchmuster.launch.network.reach import name_several
from torchmuster.launch.schedulers.time_limits import seconds_to_job_end
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_seconds

_LOOK_EVERY_S = 1.0
# A scheduler's warning, for which ranks of muster train wait; a Slurm job may also be warned by the second signal.
_WARNING, _OTHER_WARNING = "SIGUSR1", "SIGUSR2"
_NEXT_HEARTBEATS_S = 2.5


class PrepareNodes(Protocol):
    """Prepare hosts and compare them with the others."""

    async def __call__(self, nodes: Sequence[NodeHandle], *, again: bool) -> None:
        """Prepare these hosts."""


class NodeRejoin:
    """Wait for missing hosts while an attempt runs, and prepare those that join."""

    def __init__(
        self,
        spec: JobSpec,
        session: Session,
        *,
        say: Callable[[str], None],
        prepare: PrepareNodes,
        is_running: Callable[[], bool],
    ) -> None:
        self._ranks_can_save = spec.checkpoints is not None
        self._session = session
        self._say = say
        self._prepare = prepare
        self._is_running = is_running
        self._task: asyncio.Task[None] | None = None
        self.asked_to_save = False

    async def __aenter__(self) -> None:
        """Start waiting if a host is missing."""
        if self._session.registry.left_out:
            self._task = asyncio.create_task(self._look())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop waiting."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look(self) -> None:
        session = self._session
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            # Until the attempt runs, the hosts answer to its start and accept no other request.
            new = [one for one in session.registry.newcomers if one.prepared is None]
            if not new or not self._is_running():
                continue
            ready = [node for node in new if await self._is_ready(node)]
            if not ready:
                continue
            who = name_several([node.name for node in ready])
            if self._ranks_can_save:
                self._say(
                    f"{who} can rejoin: asking all ranks to save a checkpoint before the restart"
                )
                self.asked_to_save = True
                session.pass_on("SIGUSR1")
                return
            self._say(f"{who} can rejoin at the next restart")

    async def _is_ready(self, node: NodeHandle) -> bool:
        try:
            await self._prepare([node], again=True)
        except MusterError as error:
            self._say(f"{node.name} connected, but cannot rejoin: {error.what}")
            await self._session.registry.send_away(node)
            return False
        return True


def rejoin_message(registry: NodeRegistry, all_machines: int, global_batch_size: int | None) -> str:
    """Return how many hosts a run continues with: ``continuing with 3 of 4 hosts, without d``."""
    here = len(registry.nodes)
    without = f", without {name_several(registry.left_out)}" if registry.left_out else ""
    batch = (
        "" if global_batch_size is None else f"; the global batch size stays {global_batch_size:,}"
    )
    return f"continuing with {here:,} of {all_machines:,} hosts{without}{batch}"


def _spares_text(spares: Sequence[NodeHandle], wanted: int) -> str:
    names = name_several([node.name for node in spares]) if spares else "none has joined"
    return f"spares: {names}" + (f" ({len(spares)} of {wanted})" if len(spares) != wanted else "")


# The same error at the same step this many times is a crash loop.
_LOOP = 3
_LONGEST_PAUSE_S = 30.0
_CANNOT_MEND_ITSELF = re.compile(
    r" failed: (?:(?:ModuleNotFound|Import|Syntax|Indentation|Tab)Error\b|exit code 2$)"
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """A failed attempt and the training progress at its end; steps are None where unknown.

    ``got_on``: it wrote a newer checkpoint. ``saved`` is the newest checkpoint's step and ``reached`` the
    last finished step. ``mistake``: another attempt would fail the same way. ``resumes``: another attempt
    would begin at ``saved``.
    """

    finding: Finding
    mistake: bool = False
    got_on: bool = False
    saved: int | None = None
    reached: int | None = None
    resumes: bool = True

    @property
    def from_step(self) -> int | None:
        """The step that another attempt begins at; None if unknown."""
        return self.saved if self.resumes else None


def decide_restart(history: Sequence[PastAttempt], *, max_restarts: int) -> Decision[float | None]:
    """Return the pause before the restart in seconds, or None to end the run.

    ``max_restarts`` are allowed in a row; a newer checkpoint resets the count. The reason is for the
    user: which restart this is, or why there is none.
    """
    last = history[-1]
    row = _in_a_row(history)
    never_worked = len(history) == 1 and last.saved is None and last.reached is None
    if max_restarts == 0 or (never_worked and last.mistake):
        return Decision(value=None, reason="")  # the cause needs no addition
    if loop := _crash_loop(row):
        return Decision(value=None, reason=loop)
    if len(row) > max_restarts:
        return Decision(value=None, reason=_used_up(row, max_restarts))
    pause_s = 0.0 if len(row) == 1 else min(2.0 ** (len(row) - 1), _LONGEST_PAUSE_S)
    return Decision(value=pause_s, reason=f"restart {len(row)} of {max_restarts}")


def restart_announcement(last: PastAttempt, pause_s: float, reason: str) -> str:
    """Return what failed and where the run resumes: ``…; restarting from step 100 (restart 1 of 3)``."""
    place = "" if last.from_step is None else f" from step {last.from_step:,}"
    when = f" in {pause_s:.0f} s" if pause_s else ""
    return f"{last.finding.what}; restarting{place}{when} ({reason})"


def with_reason(finding: Finding, reason: str) -> Finding:
    """Return why the run failed together with why it was not restarted."""
    return replace(finding, why="\n".join(part for part in (reason, finding.why) if part))


def needs_user(finding: Finding, failures: Iterable[protocol.Failure]) -> bool:
    """Return whether the user must fix the cause, because another attempt would fail the same way.

    This applies to torchmuster's own errors, which name the fix, and to code that cannot be parsed or
    imported.
    """
    ours = (failure.what.partition("\n")[0] for failure in failures if failure.what)
    return bool(_CANNOT_MEND_ITSELF.search(finding.what)) or any(
        what in finding.what for what in ours
    )


def _in_a_row(history: Sequence[PastAttempt]) -> list[PastAttempt]:
    """Return the last attempts, starting with the one that wrote the newest checkpoint."""
    row: list[PastAttempt] = []
    for attempt in reversed(history):
        row.insert(0, attempt)
        if attempt.got_on:
            break
    return row


def _crash_loop(row: Sequence[PastAttempt]) -> str:
    """Return a description of the crash loop; "" if there is none."""
    last = row[-1]
    alike = list(itertools.takewhile(lambda one: _signature(one) == _signature(last), row[::-1]))
    known = last.saved is not None or last.reached is not None
    if len(alike) < _LOOP or not known or _from_outside(last.finding):
        return ""
    where = "before its first step" if last.reached is None else f"after step {last.reached:,}"
    return f"crash loop: failed {len(alike)} times {where} with the same error; {_standing(last)}"


def _used_up(row: Sequence[PastAttempt], max_restarts: int) -> str:
    allowed = "1 restart was" if max_restarts == 1 else f"{max_restarts} restarts were"
    if row[-1].saved is None and row[-1].reached is None:
        return f"failed {len(row)} times; {allowed} allowed"
    return (
        f"failed {len(row)} times without a newer checkpoint ({allowed} allowed); "
        f"{_standing(row[-1])}"
    )


def _standing(last: PastAttempt) -> str:
    if last.saved is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is step {last.saved:,}"


def _signature(attempt: PastAttempt) -> tuple[str, int | None, int | None]:
    """Return a key that is equal for equal failures: the error without its numbers, and the steps."""
    what = attempt.finding.what
    error = what.partition(" failed: ")[2] or what
    return _NUMBERS.sub("#", error), attempt.reached, attempt.saved


def _from_outside(finding: Finding) -> bool:
    """Return whether the cause is external (lost host, SIGKILL), which is never a crash loop."""
    return finding.name == "host-lost" or "SIGKILL" in finding.what


_LOOK_WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How a run ended: ``good``, or the finding with the cause; ``left`` are hosts that did not confirm the end.

    ``saved`` is the message of the ranks that saved after a stop request, ``origin`` the origin of the request.
    ``killed`` names the ranks that had to be killed after it. ``words`` is the text for the event log if the caller
    prints the rest itself.
    """

    good: bool
    stopped: bool = False
    origin: str = ""
    killed: stopping.KilledRanks | None = None
    finding: Finding | None = None
    left: tuple[str, ...] = ()
    saved: str = ""
    words: str = ""


def _farewell(outcome: JobOutcome | None) -> tuple[int, str]:
    """Return the exit code and the message for the node agents of other hosts; None: an error."""
    if outcome is None:
        return ExitCode.FAILED, "the run stopped"
    if outcome.good:
        return ExitCode.GOOD, "the run finished"
    if outcome.finding is not None:
        return ExitCode.FAILED, outcome.finding.what
    if outcome.saved:
        return ExitCode.SAVED, outcome.saved
    return ExitCode.TERMINATED, "the run stopped"


class JobRunner:
    """One run, from the node registry to its end, with all its attempts."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        console: Console,
        *,
        run_id: str,
        logs: str,
        on_phase: Callable[[str], None] = lambda _: None,
        examine: Examine | None = None,
    ) -> None:
        self._spec = spec
        self._transport = transport
        self._console = console
        self._tell_phase = on_phase
        self._phase = ""
        self._logs = Path(logs)
        self._many = len(transport.places) > 1
        self._session = Session(
            spec, transport, console, run_id=run_id, logs=logs, on_phase=self._on_phase
        )
        self._spares = SparePool(
            self._session.registry,
            RunFolder(self._logs.parent),
            say=console.say,
            prepare=lambda nodes: self._prepare(nodes, again=True),
            is_running=lambda: self._phase == "running",
            examine=examine,
        )
        self._broken: dict[int, str] = {}  # the hosts that failed in the last attempt, and why
        self._history: list[PastAttempt] = []
        self._warning: stopping.StopCause | None = None  # forwarded to the ranks
        self._warned_before = False
        self.token = self._session.token
        self.stop = self._session.stop

    def pass_on(self, name: str) -> None:
        """Forward a signal to every rank: a scheduler's warning, or another signal as it is.

        A warning is SIGUSR1, or SIGUSR2 in a Slurm job or to ``muster train``. It would kill a script that does not
        handle it, so such a script gets SIGTERM instead, and has until the end of the job to stop. Ranks of ``muster train`` wait for SIGUSR1. They get SIGTERM if native code (NCCL, a
        profiler) has replaced their handler.
        """
        can_save = self._spec.checkpoints is not None
        may_be_warned = can_save or "SLURM_JOB_ID" in os.environ
        if name != _WARNING and not (name == _OTHER_WARNING and may_be_warned):
            self._session.pass_on(name)
            return
        if self._session.cause is not None:
            return  # the ranks are being stopped already
        sent = _WARNING if can_save else name
        why = "" if can_save or self._session.handles(sent) else "which the script does not handle"
        if self._session.is_replaced(sent):
            why = f"but native code in a rank has replaced the handler of {sent}"
        origin = f"{name} to the launcher"
        if why and self._waits_for_heartbeats(name):
            return
        if why:
            within_s = seconds_to_job_end(os.environ)
            self._console.say(
                f"the launcher received {name}, {why}: stopping all ranks with SIGTERM within "
                f"{format_seconds(within_s)}"
            )
            self._session.stop(origin, warned_s=within_s)
            return
        if self._warning is None:
            self._warning = stopping.StopCause(origin=origin)
        self._session.pass_on(sent)

    def _waits_for_heartbeats(self, name: str) -> bool:
        """Return whether to decide with the next heartbeats: a script may just have set its handler."""
        if self._warned_before:
            return False
        self._warned_before = True
        with contextlib.suppress(RuntimeError):  # no event loop
            asyncio.get_running_loop().call_later(_NEXT_HEARTBEATS_S, self.pass_on, name)
            return True
        return False

    def _on_phase(self, name: str) -> None:
        self._phase = name
        self._tell_phase(name)

    async def run(self) -> JobOutcome:
        """Run the job to its end."""
        session = self._session
        outcome: JobOutcome | None = None
        try:
            self._on_phase("waiting" if self._spec.wait_s else "joining")
            await self._transport.open(session.registry.arrive)
            await self._gather_hosts()
            if self._spec.spares:
                self._console.say(_spares_text(session.registry.spares, self._spec.spares))
                async with self._spares:
                    outcome = await self._attempts()
            else:
                outcome = await self._attempts()
        except Stopped:
            nodes = session.registry.nodes
            if session.failed_before_stop:
                outcome = JobOutcome(good=False, finding=await session.fail(nodes))
            else:
                await session.end(nodes)
                outcome = self._stopped(nodes, session.cause)
        finally:
            if outcome is not None and outcome.good and self._spec.hosts_return:
                # Before the other hosts are released for good: this one may still be killed and replaced.
                self._tell_phase(run_state.FINISHED)
            await session.leave(*_farewell(outcome))
        return outcome

    async def _gather_hosts(self) -> None:
        """Wait for all hosts and prepare them; one that is lost meanwhile may be replaced."""
        session = self._session
        await session.registry.call(range(len(self._transport.places)))
        while True:
            everybody = [*session.registry.nodes, *session.registry.spares]
            try:
                if self._many:
                    self._console.say(session.registry.words())
                    self._refuse(session.differing_records(everybody))
                await self._prepare(everybody)
                return
            except MachineLost as error:
                if not self._spec.hosts_return:
                    raise
                self._console.say(f"{error.what}; waiting for the host that replaces it")
                await session.registry.call_back_the_lost()

    def _stopped(self, nodes: Sequence[NodeHandle], cause: stopping.StopCause | None) -> JobOutcome:
        """Return the outcome of a run that was stopped on request."""
        at_once = self._session.killed_at_once
        return JobOutcome(
            good=False,
            stopped=True,
            origin=cause.origin if cause else "",
            left=tuple(node.name for node in nodes if node.lost and not node.ended),
            saved=stopping.saved_after_request(nodes, cause, self._logs.parent / "metrics"),
            killed=stopping.killed_after_request(
                nodes, grace_s=self._spec.limits.grace_s, at_once=at_once
            ),
        )

    async def _prepare(self, nodes: Sequence[NodeHandle], *, again: bool = False) -> None:
        await self._session.prepare(nodes, again=again)
        if self._many:
            everybody = {node.place: node for node in (*self._session.registry.nodes, *nodes)}
            findings = self._session.differences(list(everybody.values()))
            self._console.show([one for one in findings if one.status is not Status.FAILURE])
            self._refuse(findings)
        self._session.say_reasons(nodes)

    def _refuse(self, findings: Sequence[Finding]) -> None:
        """Raise before the run starts if the hosts cannot work together."""
        failures = [one for one in findings if one.status is Status.FAILURE]
        self._console.show(failures[1:])
        if failures:
            first = failures[0]
            raise Impossible(first.what, why=first.why, fix=first.fix)

    # ---- attempts

    async def _attempts(self) -> JobOutcome:
        number, after = 0, await self._look(time.time(), training_progress.TrainingProgress())
        await self._log_resume(after)
        while True:
            began, before = time.time(), after
            taking_in = NodeRejoin(
                self._spec,
                self._session,
                say=self._console.say,
                prepare=self._prepare,
                is_running=lambda: self._phase == "running",
            )
            finding = await self._attempt(number, taking_in, before)
            nodes = self._session.registry.nodes
            if finding is None:
                metrics = self._logs.parent / "metrics"
                saved = self._warning and stopping.saved_after_request(
                    nodes, self._warning, metrics
                )
                return self._stopped(nodes, self._warning) if saved else JobOutcome(good=True)
            number += 1
            replaced = self._lose_replaced_hosts(nodes)
            self._broken = broken_hosts(nodes) if self._spec.spares else {}
            after = await self._look(began, before)
            warned = self._warning is not None or taking_in.asked_to_save
            can_save = self._spec.checkpoints is not None
            origin = self._warning.origin if self._warning else ""
            if words := node_handle.trouble_text(nodes, warned=warned and can_save, origin=origin):
                if self._warning or not (taking_in.asked_to_save or replaced):
                    return JobOutcome(good=False, stopped=True, saved=words)
                if replaced:
                    await self._announce_replacement(words, after)
                continue
            self._history.append(self._failed(finding, before, after))
            chosen = decide_restart(self._history, max_restarts=self._spec.max_restarts)
            if chosen.value is None and (origin := node_handle.asked_elsewhere(nodes)):
                return self._stopped(nodes, stopping.StopCause(origin=origin))
            if chosen.value is None:
                return JobOutcome(good=False, finding=with_reason(finding, chosen.reason))
            await self._announce(chosen.value, chosen.reason, after.resume)
            await self._session.waiting.unless_stopped(asyncio.sleep(chosen.value))

    async def _log_resume(self, progress: training_progress.TrainingProgress) -> None:
        """Log that training continues from a checkpoint of an earlier launch."""
        if progress.saved is None or not is_ours(self._spec.command):
            return
        what = f"resumed from step {progress.saved:,}"
        facts = {"what": what, "from_step": progress.saved}
        run = RunFolder(self._logs.parent)
        await asyncio.to_thread(run_state.log_event, run, run_state.RESUMED, **facts)

    def _lose_replaced_hosts(self, nodes: Sequence[NodeHandle]) -> bool:
        """Wait no longer for hosts that their scheduler stopped and will replace; return whether there are any."""
        if not self._spec.hosts_return:
            return False
        stopped = [node for node in nodes if node.ended and node.ended.asked]
        for node in stopped:
            node.lose("its scheduler stopped it")
        return bool(stopped)

    async def _announce_replacement(
        self, saved: str, after: training_progress.TrainingProgress
    ) -> None:
        facts = {"headline": saved, "from_step": after.saved, "noticed_unix_s": time.time()}
        run = RunFolder(self._logs.parent)
        await asyncio.to_thread(run_state.log_event, run, run_state.RESTART, **facts)
        self._console.say(f"{saved}; waiting for the host that replaces the one that was stopped")

    async def _announce(self, pause_s: float, reason: str, resume: ResumePlan | None) -> None:
        """Print and log what failed, that the run restarts, and how its script resumes."""
        last = self._history[-1]
        run = RunFolder(self._logs.parent)
        facts = {
            "headline": last.finding.what,
            "from_step": last.from_step,
            "noticed_unix_s": self._session.noticed_unix_s,
        }
        await asyncio.to_thread(run_state.log_event, run, run_state.RESTART, **facts)
        self._console.say(restart_announcement(last, pause_s, reason))
        if resume is not None:
            self._console.say(restart_text(resume))

    async def _attempt(
        self, number: int, taking_in: NodeRejoin, now: training_progress.TrainingProgress
    ) -> Finding | None:
        """Run one attempt; return None on success, else the finding."""
        session = self._session
        self._on_phase("starting")
        for node in session.registry.nodes:
            node.expect(number)
        missed = session.registry.left_out
        try:
            is_changed = session.resume_script(now.resume, again=number > 0)
            if is_changed and number == 0 and now.resume is not None:  # a requeued job
                self._console.say(restart_text(now.resume))
            if self._spec.spares:
                await self._take_over()
            if back := await session.registry.call_back_the_lost():
                await self._prepare(back, again=True)
            if is_changed:
                await session.prepare(session.registry.nodes, again=True)
        except MachineLost:
            return await session.fail(session.registry.nodes)
        if session.registry.left_out != missed or (number == 0 and missed):
            batch = now.global_batch_size
            hosts = len(self._transport.places) - self._spec.spares
            self._console.say(rejoin_message(session.registry, hosts, batch))
        async with taking_in:
            return await session.attempt(session.registry.nodes, number)

    async def _take_over(self) -> None:
        """Let spares replace the hosts that failed in the last attempt, or that did not join."""
        session = self._session
        broken = {**self._broken, **broken_hosts(session.registry.nodes)}
        self._broken = {}
        await session.waiting.unless_stopped(self._spares.take_over(broken))

    def _failed(
        self,
        finding: Finding,
        before: training_progress.TrainingProgress,
        after: training_progress.TrainingProgress,
    ) -> PastAttempt:
        ends = [node.ended for node in self._session.registry.nodes if node.ended]
        failures = [failure for ended in ends for failure in ended.failures]
        return PastAttempt(
            finding=finding,
            mistake=needs_user(finding, failures),
            got_on=after.checkpoint is not None and after.checkpoint != before.checkpoint,
            saved=after.saved,
            reached=after.reached,
            resumes=after.resume is None or bool(after.resume.on_restart()),
        )

    async def _look(
        self, since_unix_s: float, known: training_progress.TrainingProgress
    ) -> training_progress.TrainingProgress:
        """Read the training progress; object storage that does not respond must not block the run."""
        metrics = self._logs.parent / "metrics"
        work = asyncio.to_thread(
            training_progress.read_training_progress,
            self._spec,
            metrics,
            since_unix_s=since_unix_s,
            known=known,
        )
        try:
            in_time = asyncio.wait_for(work, _LOOK_WITHIN_S)
            return await self._session.waiting.unless_stopped(in_time)
        except TimeoutError:
            return replace(known, reached=None)
