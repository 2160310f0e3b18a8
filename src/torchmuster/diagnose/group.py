"""The course of ``muster check``: who is here, what each is like, how they reach each other, real ranks.

One session with the machines serves for all of it. Whatever fails is a finding, and the rest goes on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from torchmuster.diagnose import collectives, partition, probing
from torchmuster.diagnose.away import why_all_away
from torchmuster.diagnose.consequences import without_consequences
from torchmuster.diagnose.conversation import Examiner
from torchmuster.diagnose.folding import fold
from torchmuster.diagnose.links.judge import judge as judge_links
from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.links.survey import survey
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.diagnose.result import GroupResult, Machine, headline
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status, exit_code, from_error
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.job_runner import Outcome
from torchmuster.launch.launcher.node_handle import Node
from torchmuster.launch.launcher.session import Session, Voice
from torchmuster.launch.launcher.waiting import Stopped
from torchmuster.launch.network.reach import several
from torchmuster.launch.transports.channel import Transport

_EXAMINED_WITHIN_S = 40.0
# A machine's own look at its firewall is a guess; that the others reach it is not.
_SHOWN_BY_LINKS = frozenset({"firewall-on"})
# Whether a rule closes a port has been tried, and what keeps whom out is told of the link.
_TRIED_BY_LINKS = frozenset({"firewall-meeting-closed", "firewall-ranks-closed"})
# With these, ranks would only say once more what was said.
_NO_TORCH = frozenset({"torch-broken", "torch-missing", "module-shadowed"})

One = TypeVar("One", Node, Examiner)
Told = TypeVar("Told")


class GroupCheck:
    """One check of a group; ``result`` is there when it is over, unless it was stopped."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        voice: Voice,
        *,
        run_id: str,
        logs: str,
        on_phase: Callable[[str], None] = lambda _: None,
        quick: bool = False,
    ) -> None:
        """Check the machines on which ``spec`` would run; ``quick`` leaves out the ranks."""
        self._spec = spec
        self._transport = transport
        self._voice = voice
        self._on_phase = on_phase
        self._quick = quick
        self._many = len(transport.places) > 1
        self._ears = probing.Ears(voice)
        self._session = Session(
            spec, transport, self._ears, run_id=run_id, logs=logs, on_phase=on_phase
        )
        self._attempts = 0
        self._findings: list[Finding] = []
        self._links: list[Link] = []
        self._apart: set[tuple[int, int]] = set()
        self._of_machines: dict[int, list[Finding]] = {}
        self._ranks: list[RankRecord] = []
        self._not_tried: list[str] = []
        self.token = self._session.token
        self.stop = self._session.stop
        self.pass_on = self._session.pass_on
        self.result: GroupResult | None = None

    async def run(self) -> Outcome:
        """Do the whole of it."""
        session = self._session
        began_s = time.monotonic()
        outcome = Outcome(good=False, stopped=True)
        try:
            self._on_phase("roll-call")
            await self._transport.open(session.roll.arrive)
            absent = await session.roll.gather()
            if self._many:
                self._voice.say(session.roll.words())
            if self._spec.hosts:  # called over ssh
                looking = why_all_away(absent, self._transport.places)
                absent = await session.waiting.unless_stopped(looking)
            self._findings += absent.values()
            self._on_phase("starting")
            here = [node for node in session.roll.nodes if node.place not in absent]
            ready = await session.waiting.unless_stopped(self._look_at(here))
            await self._try_ranks(ready)
            self.result = self._result(absent, time.monotonic() - began_s)
            good = exit_code(self.result.findings) == 0
            outcome = Outcome(good=good, words=headline(self.result))
        except MusterError as error:  # the machines cannot even be called
            self._findings += from_error(error)
            self.result = self._result({}, time.monotonic() - began_s)
            raise
        except Stopped:
            await session.end(session.roll.nodes)
        finally:
            await session.leave(0 if outcome.good else 1, outcome.words or "the check has ended")
        return outcome

    # ---- each machine, and the links between them

    async def _look_at(self, nodes: Sequence[Node]) -> list[Node]:
        """Examine machines and links; return the machines that can run ranks."""
        examiners = [one for _, one in await self._each(nodes, Examiner.engage)]
        under_way: list[str] = []

        async def doing(what: str, work: Awaitable[Told]) -> Told:
            under_way.append(what)
            try:
                return await work
            finally:
                under_way.remove(what)

        async with self._session.waiting.telling(lambda: ", ".join(under_way)):
            _, ready = await asyncio.gather(
                doing("examining the machines", self._examine(examiners)),
                doing("looking at devices and code", self._each(nodes, self._session.prepare_one)),
            )
            # Not at the same time: ports that are open for a survey would be found to be in use.
            await doing("measuring the links", self._survey(examiners))
        both_ways = self._spec.backend != "muster" or any(node.has_gpus for node in nodes)
        self._findings += judge_links(self._links, both_ways=both_ways)
        self._apart = partition.apart(self._links, both_ways=both_ways)
        if self._many:
            await self._compare([node for node in nodes if not node.lost])
        self._tell_of_machines()
        self._session.say_reasons([node for node, _ in ready])
        return [node for node, _ in ready if not node.lost]

    async def _examine(self, examiners: Sequence[Examiner]) -> None:
        argument = {"folder": self._spec.folder}

        async def examine(examiner: Examiner) -> list[Finding]:
            told = await examiner.ask("examine", argument, within_s=_EXAMINED_WITHIN_S)
            return [_finding(one) for check in told for one in check["findings"]]

        found = await self._each(examiners, examine)
        self._of_machines = {examiner.place: told for examiner, told in found}

    async def _survey(self, examiners: Sequence[Examiner]) -> None:
        if len(examiners) < 2:
            return
        try:
            self._links = await survey(
                examiners,
                port=self._spec.port,
                address=self._spec.address,
                timeout_s=self._spec.limits.reach_s,
            )
        except MusterError as error:
            self._findings += from_error(error)

    async def _compare(self, nodes: Sequence[Node]) -> None:
        try:
            differences = await self._session.differences(nodes)
        except MusterError as error:
            differences = from_error(error)
        without = [node for node in nodes if node.record is not None and not node.record.torch]
        if all(self._found(node) & _NO_TORCH for node in without):  # and told why, which is better
            differences = [one for one in differences if one.name != "torch-missing"]
        self._findings += differences

    def _tell_of_machines(self) -> None:
        """Add what the machines' own checks found, unless the group has shown more about it."""
        reached = partition.reached(self._links)
        tried = {link.target.place for link in self._links}
        names = self._transport.places
        kept = {
            names[place]: [
                one
                for one in found
                if not (place in reached and one.name in _SHOWN_BY_LINKS)
                and not (place in tried and one.name in _TRIED_BY_LINKS)
            ]
            for place, found in self._of_machines.items()
        }
        self._findings += fold(kept, named=self._many)

    async def _each(
        self, many: Sequence[One], work: Callable[[One], Awaitable[Told]]
    ) -> list[tuple[One, Told]]:
        """Do something with all at once; one that fails is a finding, and left out of the answer."""
        done = []
        found = await asyncio.gather(*map(work, many), return_exceptions=True)
        for one, told in zip(many, found, strict=True):
            if isinstance(told, MusterError):
                if self._many and not told.what.startswith(one.name):
                    told.what = f"{one.name}: {told.what}"
                self._findings += from_error(told)
            elif isinstance(told, BaseException):
                raise told
            else:
                done.append((one, told))
        return done

    # ---- real ranks

    async def _try_ranks(self, ready: Sequence[Node]) -> None:
        if self._quick:
            self._not_tried.append("ranks: left out, as --quick asks")
            return
        able = [node for node in ready if self._has_torch(node)]
        if unable := [node.name for node in ready if node not in able]:
            self._not_tried.append(f"ranks on {several(unable)}: torch cannot be used there")
        groups = partition.able_together(able, self._apart)
        if len(groups) > 1:
            names = "; ".join(several([node.name for node in group]) for group in groups)
            self._not_tried.append(
                f"ranks on all machines together: what was found keeps them apart ({names})"
            )
        for group in groups:
            await self._probe(group)

    def _has_torch(self, node: Node) -> bool:
        return bool(node.record and node.record.torch) and not self._found(node) & _NO_TORCH

    def _found(self, node: Node) -> set[str]:
        return {one.name for one in self._of_machines.get(node.place, ())}

    async def _probe(self, nodes: Sequence[Node]) -> None:
        probed = await self._run_probe(nodes, {})
        second = None
        if variables := collectives.second_try(probed.records):
            told = " ".join(f"{name}={value}" for name, value in variables.items())
            self._voice.say(f"some values were wrong; once more with {told}")
            second = (await self._run_probe(nodes, variables)).records
        self._ranks += probed.records
        self._findings += [*collectives.judge(probed.records, second), *probed.trouble]

    async def _run_probe(
        self, nodes: Sequence[Node], environment: Mapping[str, str]
    ) -> probing.Probed:
        spec = probing.spec_of(self._spec, environment)
        probed = await probing.probe(self._session, self._ears, nodes, spec, attempt=self._attempts)
        self._attempts += 1
        return probed

    # ---- what it comes to

    def _result(self, absent: Mapping[int, Finding], seconds: float) -> GroupResult:
        known = {node.place: node for node in self._session.roll.nodes}
        return GroupResult(
            machines=tuple(
                _machine(name, place, known.get(place), absent.get(place))
                for place, name in enumerate(self._transport.places)
            ),
            findings=tuple(without_consequences(self._findings, self._transport.places)),
            links=tuple(self._links),
            ranks=tuple(self._ranks),
            not_tried=tuple(self._not_tried),
            seconds=seconds,
        )


def _machine(name: str, place: int, node: Node | None, absent: Finding | None) -> Machine:
    record = None if node is None else node.record
    missing = (absent.why or absent.what).partition("\n")[0] if absent else ""
    if node is None or record is None:
        return Machine(name=name, place=place, missing=missing or "it did not come")
    return Machine(
        name=name,
        place=place,
        missing=node.lost or missing,
        host=record.host,
        system=record.system,
        python=record.python,
        torch=record.torch,
        torchmuster=record.torchmuster,
        cores=record.cores,
        addresses=tuple(one.address for one in record.addresses),
        clock_offset_s=node.clock_offset_s,
        devices=node.prepared.devices if node.prepared else (),
        ranks=node.prepared.ranks if node.prepared else None,
    )


def _finding(told: Mapping[str, str]) -> Finding:
    try:
        return Finding(
            status=Status(told["status"]),
            **{key: str(told[key]) for key in ("name", "what", "why", "fix", "evidence")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MusterError(f"what it found cannot be understood: {error!r}") from error
