"""The launcher's side of ``muster check``: the host probes and the probing ranks."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from torchmuster.diagnose.probe_client import ProbeClient
from torchmuster.diagnose.rank_record import RankRecord, records_from
from torchmuster.diagnose.texts import finding
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.attempt import Attempt
from torchmuster.launch.launcher.console import Console
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.session import Session
from torchmuster.units import name_several

_START_WITHIN_S = 20.0
_LINES_SHOWN = 4
PROGRAM = "torchmuster.diagnose.probes.collectives"
# Much longer than the probe's own deadlines, as importing torch on a busy host is slow.
DEADLINE_S = 180.0


class HostProbe(ProbeClient):
    """The probe program next to a node agent."""

    def __init__(self, node: ConnectedHost) -> None:
        assert node.record is not None
        super().__init__(node.name, lambda line: node.channel.send(protocol.Relay(text=line)))
        self.place = node.place
        self.record = node.record

    @classmethod
    async def engage(cls, node: ConnectedHost) -> "HostProbe":
        """Start the program on a host that has joined."""
        examiner = cls(node)
        await node.start_sidecar(examiner._hear, within_s=_START_WITHIN_S)
        return examiner

    def _hear(self, message: protocol.Relay) -> None:
        if message.is_last:
            self.end(_exit_text(message))
        else:
            self.hear(message.text)


def _exit_text(last: protocol.Relay) -> str:
    """Return how a probe exited, as text."""
    tail = "\n".join(last.text.strip().splitlines()[-_LINES_SHOWN:])
    if last.exit_code is None:
        return tail or "its node agent is lost"
    how = f"on signal {-last.exit_code}" if last.exit_code < 0 else f"with code {last.exit_code}"
    return f"the probe program exited {how}\n{tail}".strip()


class ProbeOutput(Console):
    """A console that keeps the output of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0
        self._ended: set[int] = set()
        self.lines: list[str] = []
        self.all_ended = asyncio.Event()  # every rank has printed its last record

    def world(self, size: int) -> None:
        """Set the number of ranks."""
        self._size = size

    def output(self, rank: int, text: str) -> None:
        """Keep the output of a rank."""
        lines = text.splitlines()
        self.lines += lines
        self._ended |= {record.rank for record in records_from(lines) if record.ended}
        if len(self._ended) == self._size > 0:
            self.all_ended.set()

    def clear(self) -> None:
        """Clear the output of the previous ranks."""
        self._size = 0
        self._ended.clear()
        self.lines.clear()
        self.all_ended.clear()

    def progress(self) -> str:
        """Return the stages of the ranks as text; "" before their first record."""
        stages = Counter(record.stage for record in records_from(self.lines))
        running = ", ".join(f"{stage} ({count} ranks)" for stage, count in stages.items())
        return f"ranks running: {running}" if running else ""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The records of the ranks, and the findings about the job itself if it failed."""

    records: list[RankRecord]
    trouble: tuple[Finding, ...] = ()


def spec_of(spec: JobSpec, environment: Mapping[str, str]) -> JobSpec:
    """Return the job that probes the hosts and devices of another job."""
    return dataclasses.replace(
        spec,
        command=(PROGRAM,),
        module=True,
        max_restarts=0,
        environment={**spec.environment, **environment},
    )


async def run_check_ranks(
    session: Session,
    output: ProbeOutput,
    nodes: Sequence[ConnectedHost],
    spec: JobSpec,
    *,
    attempt: int,
) -> Probed:
    """Run the probe on these hosts; errors of a host become findings."""
    trouble: list[Finding] = []
    output.clear()
    job = Attempt(session, nodes, attempt)
    try:
        preparing = (session.prepare_one(node, spec=spec) for node in nodes)
        await session.waiting.unless_stopped(asyncio.gather(*preparing))
        async with session.waiting.reporting(output.progress), asyncio.timeout(DEADLINE_S):
            finding = await _until_ended(job, output)
        trouble += [finding] if finding is not None else []
    except TimeoutError:
        await job.end()
        trouble.append(_hangs(nodes, records_from(output.lines)))
    except MusterError as error:  # no common rendezvous address, or a host is lost
        await job.end()
        trouble += from_error(error)
    return Probed(records=_name(records_from(output.lines), nodes), trouble=tuple(trouble))


async def _until_ended(attempt: Attempt, output: ProbeOutput) -> Finding | None:
    """Run the job until its ranks have printed their last records; do not wait for their exit."""
    job = asyncio.ensure_future(attempt.run())
    ended = asyncio.ensure_future(output.all_ended.wait())
    try:
        await asyncio.wait({job, ended}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
    finally:
        for task in (job, ended):
            task.cancel()
        await asyncio.gather(job, ended, return_exceptions=True)
    await attempt.end(grace_s=0.0)
    return None


def _name(records: Sequence[RankRecord], nodes: Sequence[ConnectedHost]) -> list[RankRecord]:
    """Replace the hosts' own names by the names that the user gave them."""
    return [
        msgspec.structs.replace(record, host=nodes[record.node].name)
        if record.node is not None and 0 <= record.node < len(nodes)
        else record
        for record in records
    ]


def _hangs(nodes: Sequence[ConnectedHost], records: Sequence[RankRecord]) -> Finding:
    world = sum(node.prepared.ranks for node in nodes if node.prepared)
    ended = {record.rank for record in records if record.ended}
    silent = [f"rank {rank}" for rank in range(world) if rank not in ended]
    return finding(
        "probe-hangs",
        silent=name_several(silent),
        deadline_s=DEADLINE_S,
        evidence="\n".join(
            f"rank {record.rank} reached stage {record.stage}" for record in records
        ),
    )
