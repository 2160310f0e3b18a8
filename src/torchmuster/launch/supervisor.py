"""The launcher's heart: calls the roll, settles where to meet, starts, watches, carries failures, ends.

It does not know how machines are reached (that is the transport's) nor how a machine starts its ranks
(the keeper's). Every wait has a limit, and whoever waits says for whom.
"""

import asyncio
import contextlib
import itertools
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchmuster.errors import Impossible, MachineLost, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch import compare, verdict, wire
from torchmuster.launch.agent import GRACE_VARIABLE
from torchmuster.launch.channel import Transport
from torchmuster.launch.meeting import Meeting, meet
from torchmuster.launch.network.reach import several
from torchmuster.launch.node import Node
from torchmuster.launch.rank_logs import RankLogs
from torchmuster.launch.roll_call import RollCall
from torchmuster.launch.spec import JobSpec
from torchmuster.launch.waiting import Stopped, Waiting

_LONGEST_PAUSE_S = 30.0
# What an ending machine may take beyond its grace, before it is given up.
_END_WITHIN_S = 8.0
_LEAVE_WITHIN_S = 3.0
_MACHINES_SHOWN = 16
_SILENCES_TOLD = 7
# What torch says while it starts does not show that a rank is at work.
_LIBRARY_WORDS = re.compile(r"\[[EFIW]\d{4} ")


class Voice(Protocol):
    """How the launcher speaks."""

    def say(self, text: str) -> None:
        """Say something of the launcher's own."""

    def world(self, size: int) -> None:
        """Learn how many ranks there are."""

    def output(self, rank: int, text: str) -> None:
        """Show what a rank wrote."""

    def show(self, findings: Sequence[Finding]) -> None:
        """Show findings."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: ``good``, or the finding that says why not; ``left`` did not say that they ended."""

    good: bool
    stopped: bool = False
    finding: Finding | None = None
    left: tuple[str, ...] = ()


def environment_of(spec: JobSpec) -> dict[str, str]:
    """Return the variables that the ranks of a job get on every machine."""
    return {GRACE_VARIABLE: f"{max(1.0, spec.limits.grace_s):.0f}"} | spec.environment


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
        self._run_id = run_id
        self._logs = logs
        self._rank_logs = RankLogs(Path(logs), voice.say)
        self.token = os.urandom(16).hex()
        self._on_phase = on_phase
        self._stop_why = ""
        self._stop_grace_s = spec.limits.grace_s
        self._heard_ranks: set[int] = set()
        self._silences = 0
        self._many = len(transport.places) > 1
        self._waiting = Waiting(voice.say)
        self._roll = RollCall(
            transport,
            self._waiting,
            token=self.token,
            join_s=spec.limits.join_s,
            # A pipe to this machine ends by itself; only a network can fall silent.
            lost_after_s=spec.limits.lost_after_s if self._many else None,
            on_output=self._output,
        )

    def stop(self, why: str) -> None:
        """Ask for the end of the run; asked a second time, without any grace."""
        again = self._waiting.stopped
        self._stop_why = self._stop_why or why
        self._stop_grace_s = 0.0 if again else self._spec.limits.grace_s
        self._waiting.stop()
        if again:
            for node in self._roll.nodes:
                self._later(node.stop(0.0, why))

    def pass_on(self, name: str) -> None:
        """Pass a signal on to every rank."""
        for node in self._roll.nodes:
            self._later(node.channel.send(wire.Signal(name=name)))

    async def run(self) -> Outcome:
        """Do the whole of it."""
        outcome = Outcome(good=False, stopped=True)
        try:
            self._on_phase("roll-call")
            await self._transport.open(self._roll.arrive)
            await self._roll.call(range(len(self._transport.places)))
            if self._many:
                self._voice.say(self._roll.words())
                described = [_described(node) for node in self._roll.nodes]
                self._refuse(compare.all_nodes(described, self._spec))
            await self._prepare(self._roll.nodes)
            outcome = await self._attempts()
        except Stopped:
            await self._end_everywhere()
            left = tuple(node.name for node in self._roll.nodes if node.lost and not node.ended)
            outcome = Outcome(good=False, stopped=True, left=left)
        finally:
            async with self._waiting.telling(lambda: "waiting for the keepers to end"):
                await self._leave(outcome)
        return outcome

    # ---- before the start

    async def _prepare(self, nodes: Sequence[Node], *, again: bool = False) -> None:
        waiting: dict[str, str] = {}

        async def prepare(node: Node) -> None:
            node.prepared = await node.ask(
                self._preparation(node, again=again),
                wire.Prepared,
                within_s=None if self._spec.wait_s else 60.0,
                on_waiting=lambda words: waiting.__setitem__(node.name, words),
            )
            waiting.pop(node.name, None)

        def words() -> str:
            pending = [node.name for node in nodes if node.prepared is None]
            blocked = "; ".join(f"{name}: {text}" for name, text in waiting.items())
            return f"waiting for devices on {', '.join(pending[:8])}" + (
                f" ({blocked})" if blocked else ""
            )

        async with self._waiting.telling(words):
            await self._each(nodes, prepare)
        if self._many:
            await self._compare()
        self._say_reasons(nodes)

    def _say_reasons(self, nodes: Sequence[Node]) -> None:
        """Say why each machine gives what it gives, machines with the same reason together."""
        machines: dict[str, list[str]] = {}
        for node in nodes:
            for reason in node.prepared.reasons if node.prepared else ():
                machines.setdefault(reason, []).append(node.name)
        for reason, names in machines.items():
            self._voice.say(f"{several(names)}: {reason}" if self._many else reason)

    def _preparation(self, node: Node, *, again: bool) -> wire.Prepare:
        spec = self._spec
        host_ranks = spec.hosts[node.place].ranks if spec.hosts else None
        alone = not self._many
        return wire.Prepare(
            run_id=self._run_id,
            token=node.part,
            command=spec.command,
            module=spec.module,
            folder=spec.folder,
            device=spec.device,
            ranks=host_ranks or spec.ranks,
            gpu_ids=spec.gpu_ids,
            share=spec.share,
            # A machine that was lost still holds its devices until it notices.
            wait_s=max(spec.wait_s, 30.0) if again else spec.wait_s,
            environment=environment_of(spec),
            logs=self._logs if alone else None,
            alone=alone,
            lost_after_s=None if alone else spec.limits.lost_after_s,
        )

    async def _compare(self) -> None:
        nodes = self._roll.nodes
        described = [_described(node) for node in nodes]
        packages = {}
        for place in compare.ask_for_packages(described):
            told = await nodes[place].ask(wire.TellPackages(), wire.Packages, within_s=30.0)
            packages[place] = told.packages
        findings = compare.all_nodes(described, self._spec, packages=packages)
        self._voice.show([one for one in findings if one.status is not Status.FAILURE])
        self._refuse(findings)

    def _refuse(self, findings: Sequence[Finding]) -> None:
        """End the run before it begins if the machines cannot work together."""
        failures = [one for one in findings if one.status is Status.FAILURE]
        self._voice.show(failures[1:])
        if failures:
            first = failures[0]
            raise Impossible(first.what, why=first.why, fix=first.fix)

    # ---- attempts

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
            await self._waiting.unless_stopped(asyncio.sleep(pause))

    async def _attempt(self, attempt: int) -> Finding | None:
        """Run once; return None if it went well, else what went wrong."""
        self._heard_ranks.clear()
        self._silences = 0
        self._on_phase("starting")
        for node in self._roll.nodes:
            node.expect(attempt)
        try:
            if back := await self._roll.call_back_the_lost():
                await self._prepare(back, again=True)
            nodes = self._roll.nodes
            for node in nodes:
                node.expect(attempt)
            async with self._waiting.telling(lambda: "the machines are trying to reach each other"):
                meeting = await self._waiting.unless_stopped(
                    meet(self._spec, nodes, attempt=attempt, say=self._voice.say)
                )
            await self._start(nodes, meeting, attempt)
        except MachineLost:
            return await self._fail()
        self._on_phase("running")
        async with self._waiting.telling(self._silent_start):
            while True:
                await self._waiting.something_new(1.0)
                if any(not node.ended.good if node.ended else node.lost for node in nodes):
                    return await self._fail()
                if all(node.ended for node in nodes):
                    return None

    async def _start(self, nodes: Sequence[Node], meeting: Meeting, attempt: int) -> None:
        sizes = [node.prepared.ranks for node in nodes if node.prepared]
        first_ranks = [0, *itertools.accumulate(sizes)]
        world_size = sum(sizes)
        self._voice.world(world_size)

        async def start(node: Node) -> None:
            place = node.place
            message = wire.Start(
                attempt=attempt,
                node_rank=place,
                nodes=len(nodes),
                first_rank=first_ranks[place],
                world_size=world_size,
                backend=self._spec.backend,
                endpoint=meeting.endpoint,
                address=meeting.address,
                port=meeting.port,
                local_address=meeting.local[place].address,
                interface=meeting.local[place].interface if self._many else None,
                timeout_s=self._spec.limits.rendezvous_s,
                max_restarts=self._spec.max_restarts,
            )
            await node.start(message, within_s=30.0)

        await self._each(nodes, start)
        spread = [f"{node.name} {size}" for node, size in zip(nodes, sizes, strict=True)]
        if len(spread) > _MACHINES_SHOWN:
            spread = [f"on {len(spread):,} machines"]
        count = "1 rank" if world_size == 1 else f"{world_size:,} ranks"
        self._voice.say(f"{count} started" + (f": {', '.join(spread)}" if self._many else ""))

    def _silent_start(self) -> str:
        """Say what is waited for until the first rank prints; after a minute, only now and then."""
        self._silences += 1
        if self._heard_ranks or (self._silences > _SILENCES_TOLD and self._silences % 30):
            return ""
        if self._silences <= _SILENCES_TOLD:
            return "the ranks are starting; nothing was printed yet"
        return "the ranks are running; none of them has printed anything yet"

    def _output(self, rank: int, text: str) -> None:
        if not _LIBRARY_WORDS.match(text):
            self._heard_ranks.add(rank)
        self._voice.output(rank, text)
        if self._many:  # of one machine, the ranks themselves write there
            self._rank_logs.write(rank, text)

    # ---- ends

    async def _fail(self) -> Finding:
        """End all machines because one failed; return the verdict."""
        noticed_s = time.monotonic()
        nodes = self._roll.nodes
        await self._end_everywhere()
        return verdict.of_attempt(
            [
                verdict.NodeEnd(
                    host=node.name,
                    ended=node.ended,
                    ended_s=node.ended_s,
                    lost=node.lost,
                    lost_s=node.lost_s,
                )
                for node in nodes
            ],
            noticed_s=noticed_s,
            logs=self._logs,
            world_size=sum(node.prepared.ranks for node in nodes if node.prepared),
            grace_s=self._spec.limits.grace_s,
        )

    async def _end_everywhere(self) -> None:
        waiting = [node for node in self._roll.nodes if not node.lost and not node.ended]
        grace_s = self._stop_grace_s
        for node in waiting:
            self._later(node.stop(grace_s, self._stop_why))
        deadline = time.monotonic() + grace_s + _END_WITHIN_S

        def words() -> str:
            slow = [node.name for node in waiting if not node.ended and not node.lost]
            return f"ending; waiting for {', '.join(slow[:8])}" if slow else ""

        async with self._waiting.telling(words):
            while time.monotonic() < deadline and words():
                await self._waiting.something_new(0.2, although_stopped=True)
        if slow := words():
            self._voice.say(f"given up: {slow}")
        for node in waiting:
            if not node.ended:
                node.lose(f"it did not end within {grace_s + _END_WITHIN_S:.0f} s")

    async def _leave(self, outcome: Outcome) -> None:
        """Tell every keeper that it is over, and let go."""
        words = "the run ended well" if outcome.good else "the run has ended"
        if outcome.finding is not None:
            words = outcome.finding.what
        message = wire.Leave(exit_code=0 if outcome.good else 1, words=words)

        async def leave(node: Node) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.channel.send(message), _LEAVE_WITHIN_S)
            await node.close()

        await self._roll.close()
        # One that cannot be let go of must not keep the others.
        leaving = (leave(node) for node in self._roll.nodes)
        await asyncio.gather(*leaving, return_exceptions=True)
        await self._transport.close()
        await asyncio.to_thread(self._rank_logs.close)

    # ---- waiting

    async def _each(self, nodes: Sequence[Node], work: Callable[[Node], Awaitable[None]]) -> None:
        """Do something with all machines at once; the first that fails decides."""

        async def named(node: Node) -> None:
            try:
                await work(node)
            except MusterError as error:
                if self._many and not error.what.startswith(node.name):
                    error.what = f"{node.name}: {error.what}"
                raise

        tasks = [asyncio.ensure_future(named(node)) for node in nodes]
        try:
            await self._waiting.unless_stopped(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _later(self, work: Awaitable[None]) -> None:
        """Send without waiting for it: one machine that is stuck must not hold up the others."""
        task = asyncio.ensure_future(work)
        _PENDING.add(task)
        task.add_done_callback(_PENDING.discard)


# The event loop itself keeps no hold on tasks.
_PENDING: set["asyncio.Future[None]"] = set()


def _described(node: Node) -> compare.Described:
    assert node.record is not None
    return compare.Described(
        name=node.name,
        record=node.record,
        clock_offset_s=node.clock_offset_s,
        fingerprint=node.prepared.fingerprint if node.prepared else None,
    )
