"""The launcher's heart: a run from the roll-call to its end, started again after failures if asked."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible, MachineLost
from torchmuster.finding import Finding, Status
from torchmuster.launch.channel import Transport
from torchmuster.launch.node import Node
from torchmuster.launch.session import Session, Voice
from torchmuster.launch.spec import JobSpec
from torchmuster.launch.waiting import Stopped

_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: ``good``, or the finding that says why not; ``left`` did not say that they ended.

    ``words`` are for the ledger, where whoever asked for it tells people the rest.
    """

    good: bool
    stopped: bool = False
    finding: Finding | None = None
    left: tuple[str, ...] = ()
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
        self._on_phase = on_phase
        self._many = len(transport.places) > 1
        self._session = Session(spec, transport, voice, run_id=run_id, logs=logs, on_phase=on_phase)
        self.token = self._session.token
        self.stop = self._session.stop
        self.pass_on = self._session.pass_on

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
            outcome = Outcome(good=False, stopped=True, left=left)
        finally:
            words = "the run ended well" if outcome.good else "the run has ended"
            if outcome.finding is not None:
                words = outcome.finding.what
            await session.leave(0 if outcome.good else 1, words)
        return outcome

    async def _prepare(self, nodes: Sequence[Node], *, again: bool = False) -> None:
        await self._session.prepare(nodes, again=again)
        if self._many:
            findings = await self._session.differences(self._session.roll.nodes)
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

    async def _attempts(self) -> Outcome:
        attempt = 0
        while True:
            finding = await self._attempt(attempt)
            if finding is None:
                return Outcome(good=True)
            if attempt >= self._spec.max_restarts:
                return Outcome(good=False, finding=finding)
            attempt += 1
            pause = min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
            self._voice.say(
                f"{finding.what}; starting again in {pause:.0f} s "
                f"(restart {attempt} of {self._spec.max_restarts})"
            )
            await self._session.waiting.unless_stopped(asyncio.sleep(pause))

    async def _attempt(self, attempt: int) -> Finding | None:
        """Run once; return None if it went well, else what went wrong."""
        session = self._session
        self._on_phase("starting")
        for node in session.roll.nodes:
            node.expect(attempt)
        try:
            if back := await session.roll.call_back_the_lost():
                await self._prepare(back, again=True)
        except MachineLost:
            return await session.fail(session.roll.nodes)
        return await session.attempt(session.roll.nodes, attempt)
