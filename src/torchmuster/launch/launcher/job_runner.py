"""The launcher's heart: a run from the roll-call to its end, started again after failures if asked."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchmuster.errors import Impossible, MachineLost
from torchmuster.finding import Finding, Status
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import restart_policy, saved, training_progress
from torchmuster.launch.launcher.node_handle import Node
from torchmuster.launch.launcher.node_rejoin import TakingIn, going_on
from torchmuster.launch.launcher.rank_logs import mark_restart
from torchmuster.launch.launcher.session import Session, Voice
from torchmuster.launch.launcher.waiting import Stopped
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder

_LOOK_WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: ``good``, or the finding that says why not; ``left`` did not say that they ended.

    ``saved`` is what the ranks said that saved their work because they were asked to end. ``words`` are
    for the ledger, where whoever asked for it tells people the rest.
    """

    good: bool
    stopped: bool = False
    finding: Finding | None = None
    left: tuple[str, ...] = ()
    saved: str = ""
    words: str = ""


class Supervisor:
    """One run, from the roll-call to its end."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        voice: Voice,
        *,
        run_id: str,
        logs: str,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._transport = transport
        self._voice = voice
        self._tell_phase = on_phase
        self._phase = ""
        self._logs = Path(logs)
        self._many = len(transport.places) > 1
        self._session = Session(
            spec, transport, voice, run_id=run_id, logs=logs, on_phase=self._on_phase
        )
        self._history: list[restart_policy.Attempt] = []
        self._asked_to_save = False
        self.token = self._session.token
        self.stop = self._session.stop

    def pass_on(self, name: str) -> None:
        """Pass a signal on to every rank."""
        self._asked_to_save = self._asked_to_save or name == "SIGUSR1"
        self._session.pass_on(name)

    def _on_phase(self, name: str) -> None:
        self._phase = name
        self._tell_phase(name)

    async def run(self) -> Outcome:
        """Do the whole of it."""
        session = self._session
        outcome = Outcome(good=False, stopped=True)
        try:
            self._on_phase("roll-call")
            await self._transport.open(session.roll.arrive)
            await session.roll.call(range(len(self._transport.places)))
            if self._many:
                self._voice.say(session.roll.words())
                self._refuse(session.differing_records(session.roll.nodes))
            await self._prepare(session.roll.nodes)
            outcome = await self._attempts()
        except Stopped:
            nodes = session.roll.nodes
            await session.end(nodes)
            left = tuple(node.name for node in nodes if node.lost and not node.ended)
            outcome = Outcome(good=False, stopped=True, left=left, saved=saved.words(nodes))
        finally:
            words = "the run ended well" if outcome.good else "the run has ended"
            if outcome.finding is not None:
                words = outcome.finding.what
            await session.leave(0 if outcome.good else 1, outcome.saved or words)
        return outcome

    async def _prepare(self, nodes: Sequence[Node], *, again: bool = False) -> None:
        await self._session.prepare(nodes, again=again)
        if self._many:
            everybody = {node.place: node for node in (*self._session.roll.nodes, *nodes)}
            findings = await self._session.differences(list(everybody.values()))
            self._voice.show([one for one in findings if one.status is not Status.FAILURE])
            self._refuse(findings)
        self._session.say_reasons(nodes)

    def _refuse(self, findings: Sequence[Finding]) -> None:
        """End the run before it begins if the machines cannot work together."""
        failures = [one for one in findings if one.status is Status.FAILURE]
        self._voice.show(failures[1:])
        if failures:
            first = failures[0]
            raise Impossible(first.what, why=first.why, fix=first.fix)

    # ---- attempts

    async def _attempts(self) -> Outcome:
        number, after = 0, await self._look(time.time(), training_progress.Standing())
        while True:
            began, before = time.time(), after
            taking_in = TakingIn(
                self._spec,
                self._session,
                say=self._voice.say,
                prepare=self._prepare,
                is_running=lambda: self._phase == "running",
            )
            finding = await self._attempt(number, taking_in, before)
            if finding is None:
                return Outcome(good=True)
            number += 1
            after = await self._look(began, before)
            warned = self._asked_to_save or taking_in.asked_to_save
            can_save = self._spec.checkpoints is not None
            if words := saved.words(self._session.roll.nodes, warned=warned and can_save):
                if self._asked_to_save or not taking_in.asked_to_save:
                    return Outcome(good=False, stopped=True, saved=words)
                await asyncio.to_thread(mark_restart, self._logs)
                continue
            self._history.append(self._failed(finding, before, after))
            chosen = restart_policy.decide(self._history, max_restarts=self._spec.max_restarts)
            if chosen.value is None:
                return Outcome(
                    good=False, finding=restart_policy.with_reason(finding, chosen.reason)
                )
            await self._announce(chosen.value, chosen.reason)
            await self._session.waiting.unless_stopped(asyncio.sleep(chosen.value))

    async def _announce(self, pause_s: float, reason: str) -> None:
        """Say what failed and that all starts again, and write it down."""
        last = self._history[-1]
        self._voice.say(restart_policy.announcement(last, pause_s, reason))
        run = RunFolder(self._logs.parent)
        facts = {"headline": last.finding.what, "from_step": last.saved}
        await asyncio.to_thread(run_state.note, run, run_state.RESTART, **facts)
        await asyncio.to_thread(mark_restart, self._logs)

    async def _attempt(
        self, number: int, taking_in: TakingIn, now: training_progress.Standing
    ) -> Finding | None:
        """Run once; return None if it went well, else what went wrong."""
        session = self._session
        self._on_phase("starting")
        for node in session.roll.nodes:
            node.expect(number)
        missed = session.roll.left_out
        try:
            if back := await session.roll.call_back_the_lost():
                await self._prepare(back, again=True)
        except MachineLost:
            return await session.fail(session.roll.nodes)
        if session.roll.left_out != missed or (number == 0 and missed):
            batch = now.global_batch_size
            self._voice.say(going_on(session.roll, len(self._transport.places), batch))
        async with taking_in:
            return await session.attempt(session.roll.nodes, number)

    def _failed(
        self,
        finding: Finding,
        before: training_progress.Standing,
        after: training_progress.Standing,
    ) -> restart_policy.Attempt:
        ends = [node.ended for node in self._session.roll.nodes if node.ended]
        failures = [failure for ended in ends for failure in ended.failures]
        return restart_policy.Attempt(
            finding=finding,
            mistake=restart_policy.cannot_mend_itself(finding, failures),
            got_on=after.checkpoint is not None and after.checkpoint != before.checkpoint,
            saved=after.saved,
            reached=after.reached,
        )

    async def _look(
        self, since_unix_s: float, known: training_progress.Standing
    ) -> training_progress.Standing:
        """Look where the training stands; object storage that does not answer must not hold it up."""
        metrics = self._logs.parent / "metrics"
        work = asyncio.to_thread(
            training_progress.look, self._spec, metrics, since_unix_s=since_unix_s, known=known
        )
        try:
            in_time = asyncio.wait_for(work, _LOOK_WITHIN_S)
            return await self._session.waiting.unless_stopped(in_time)
        except TimeoutError:
            return replace(known, reached=None)
