"""Running the collectives probe as a job on machines that answered, and what came of it."""

import asyncio
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchmuster.diagnose.rank_record import RankRecord, records_from
from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Finding, Status, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.node_handle import NodeHandle, Word
from torchmuster.launch.launcher.session import Console, Session
from torchmuster.launch.network.reach import name_several

HOST_PROBE = "torchmuster.diagnose.host_probe"
_START_WITHIN_S = 20.0
_WORDS_SHOWN = 4


class HostProbe:
    """The examiner on one machine: asked things by name, many at a time if need be."""

    def __init__(self, node: NodeHandle) -> None:
        assert node.record is not None
        self.name = node.name
        self.place = node.place
        self.record = node.record
        self._node = node
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._gone = ""

    @classmethod
    async def engage(cls, node: NodeHandle) -> "HostProbe":
        """Have the program started on a machine that answered the node registry."""
        examiner = cls(node)
        await node.engage(HOST_PROBE, examiner._hear, within_s=_START_WITHIN_S)
        return examiner

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        """Return the answer; raises what the machine answers with instead, or that it does not."""
        if self._gone:
            raise self._lost()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        line = json.dumps({"id": number, "verb": verb, "argument": argument})
        try:
            async with asyncio.timeout(within_s):
                await self._node.channel.send(protocol.Relay(text=line))
                return await answer
        except TimeoutError:
            raise MusterError(
                f"{self.name} did not answer within {within_s:g} s",
                why=f"it was asked to {verb}; the machine is overloaded, or something in it hangs",
            ) from None
        finally:
            self._asked.pop(number, None)

    def _hear(self, word: Word) -> None:
        if isinstance(word, protocol.SidecarEnded):
            self._gone = _end_probing(word)
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(self._lost())
            return
        try:
            said = json.loads(word.text)
            answer = self._asked[said["id"]]
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # given up by whoever asked, or not an answer
            return
        if answer.done():
            return
        if "error" in said:
            answer.set_exception(self._error(said["error"]))
        else:
            answer.set_result(said.get("answer"))

    def _error(self, told: Any) -> MusterError:
        parts = told if isinstance(told, dict) else {}
        what, why, fix = (str(parts.get(name, "")) for name in ("what", "why", "fix"))
        return MusterError(f"{self.name}: {what or told}", why=why, fix=fix)

    def _lost(self) -> MachineLost:
        return MachineLost(f"{self.name} cannot be examined any more", why=self._gone)


def _end_probing(word: protocol.SidecarEnded) -> str:
    """Say how an examiner ended."""
    words = "\n".join(word.words.strip().splitlines()[-_WORDS_SHOWN:])
    if word.exit_code is None:
        return words or "its node agent is lost"
    how = f"by signal {-word.exit_code}" if word.exit_code < 0 else f"with code {word.exit_code}"
    return f"the program that examines it ended {how}\n{words}".strip()


PROGRAM = "torchmuster.diagnose.probes.collectives"
# Beyond its own deadlines, which are much shorter; importing torch on a busy machine takes its time.
DEADLINE_S = 180.0


class ProbeOutput:
    """A voice that keeps what the ranks write, and says the rest."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._size = 0
        self._ended: set[int] = set()
        self.lines: list[str] = []
        self.all_told = asyncio.Event()  # every rank has said its last word

    def say(self, text: str) -> None:
        """Say something of the launcher's own."""
        self._console.say(text)

    def world(self, size: int) -> None:
        """Learn how many ranks there are."""
        self._size = size

    def output(self, rank: int, text: str) -> None:
        """Keep what a rank wrote."""
        lines = text.splitlines()
        self.lines += lines
        self._ended |= {record.rank for record in records_from(lines) if record.ended}
        if len(self._ended) == self._size > 0:
            self.all_told.set()

    def listen_anew(self) -> None:
        """Forget what other ranks said before."""
        self._size = 0
        self._ended.clear()
        self.lines.clear()
        self.all_told.clear()

    def show(self, findings: Sequence[Finding]) -> None:
        """Show findings."""
        self._console.show(findings)

    def progress(self) -> str:
        """Say how far the ranks have come, once they have said something."""
        stages = Counter(record.stage for record in records_from(self.lines))
        told = ", ".join(f"{stage} ({count} ranks)" for stage, count in stages.items())
        return f"the ranks are at work: {told}" if told else ""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What the ranks told, and what became of the job itself if it did not end well."""

    records: list[RankRecord]
    trouble: tuple[Finding, ...] = ()


def spec_of(spec: JobSpec, environment: Mapping[str, str]) -> JobSpec:
    """Return the job that probes what another job would run on."""
    return dataclasses.replace(
        spec,
        command=(PROGRAM,),
        module=True,
        max_restarts=0,
        environment={**spec.environment, **environment},
    )


async def run_check_ranks(
    session: Session, ears: ProbeOutput, nodes: Sequence[NodeHandle], spec: JobSpec, *, attempt: int
) -> Probed:
    """Run the probe on these machines; never raises what a machine did wrong."""
    trouble: list[Finding] = []
    ears.listen_anew()
    try:
        preparing = (session.prepare_one(node, spec=spec) for node in nodes)
        await session.waiting.unless_stopped(asyncio.gather(*preparing))
        async with session.waiting.telling(ears.progress), asyncio.timeout(DEADLINE_S):
            finding = await _until_told(session, ears, nodes, attempt)
        trouble += [finding] if finding is not None else []
    except TimeoutError:
        await session.end(nodes)
        trouble.append(_hangs(nodes, records_from(ears.lines)))
    except MusterError as error:  # they do not find a place to meet, or one is lost
        await session.end(nodes)
        trouble += from_error(error)
    return Probed(records=_probing_name(records_from(ears.lines), nodes), trouble=tuple(trouble))


async def _until_told(
    session: Session, ears: ProbeOutput, nodes: Sequence[NodeHandle], attempt: int
) -> Finding | None:
    """Run the job until its ranks have told everything: how they take leave is not waited for."""
    job = asyncio.ensure_future(session.attempt(nodes, attempt))
    told = asyncio.ensure_future(ears.all_told.wait())
    try:
        await asyncio.wait({job, told}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
    finally:
        for task in (job, told):
            task.cancel()
        await asyncio.gather(job, told, return_exceptions=True)
    await session.end(nodes, grace_s=0.0)
    return None


def _probing_name(records: Sequence[RankRecord], nodes: Sequence[NodeHandle]) -> list[RankRecord]:
    """Call the machines as people call them, not as they call themselves."""
    return [
        msgspec.structs.replace(one, host=nodes[one.node].name)
        if one.node is not None and 0 <= one.node < len(nodes)
        else one
        for one in records
    ]


def _hangs(nodes: Sequence[NodeHandle], records: Sequence[RankRecord]) -> Finding:
    world = sum(node.prepared.ranks for node in nodes if node.prepared)
    ended = {one.rank for one in records if one.ended}
    silent = [f"rank {rank}" for rank in range(world) if rank not in ended]
    return Finding(
        name="probe-hangs",
        status=Status.FAILURE,
        what=f"the collectives hang: {name_several(silent)} did not end within {DEADLINE_S:.0f} s",
        why="a rank that waits in a collective for another one waits for ever",
        evidence="\n".join(f"rank {one.rank} came as far as {one.stage}" for one in records),
    )
