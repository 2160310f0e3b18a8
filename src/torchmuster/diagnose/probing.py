"""The launcher's side of ``muster check``: the host probes and the probing ranks."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from torchmuster.diagnose.probe_client import ProbeClient
from torchmuster.diagnose.rank_record import RankRecord, records_from
from torchmuster.diagnose.texts import finding
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch import protocol
from torchmuster.launch.launcher.attempt import Attempt
from torchmuster.launch.launcher.console import Console
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.session import Session

_START_WITHIN_S = 20.0
_LINES_SHOWN = 4
PROGRAM = "torchmuster.diagnose.probes.collectives"
# Much longer than the probe's own deadlines, as importing torch on a busy host is slow.
DEADLINE_S = 180.0


class HostProbe(ProbeClient):
    """The probe program next to a node agent."""

    def __init__(self, node: ConnectedHost) -> None:
        assert node.record is not None
        super().__init__(node.name)
        self.place = node.place
        self.record = node.record
        self._channel = node.channel
        self._messages: asyncio.Queue[protocol.Relay] = asyncio.Queue()

    @classmethod
    async def engage(cls, node: ConnectedHost) -> "HostProbe":
        """Start the program on a host that has joined."""
        probe = cls(node)
        await node.start_sidecar(probe._messages.put_nowait, within_s=_START_WITHIN_S)
        return probe

    async def send_line(self, line: str) -> None:
        """Send a line to the program."""
        await self._channel.send(protocol.Relay(text=line))

    async def receive_line(self) -> str:
        """Return its next line."""
        message = await self._messages.get()
        if not message.is_last:
            return message.text
        self._messages.put_nowait(message)  # for the next request
        text = "\n".join(message.text.strip().splitlines()[-_LINES_SHOWN:])
        if message.exit_code is not None:
            text = f"the probe program exited with code {message.exit_code}\n{text}".strip()
        raise self.lost(text or "its node agent is lost")


class ProbeOutput(Console):
    """A console that keeps the output of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def output(self, rank: int, text: str) -> None:
        """Keep the output of a rank."""
        self.lines += text.splitlines()

    def progress(self) -> str:
        """Return the stages of the ranks as text; "" before their first record."""
        stages = Counter(record.stage for record in records_from(self.lines))
        running = ", ".join(f"{stage} ({count} ranks)" for stage, count in stages.items())
        return f"ranks running: {running}" if running else ""


async def run_check_ranks(
    session: Session,
    output: ProbeOutput,
    nodes: Sequence[ConnectedHost],
    attempt: int,
    environment: Mapping[str, str],
) -> tuple[list[RankRecord], list[Finding]]:
    """Run the probe on these hosts; return the ranks' records, and why the job itself failed."""
    spec = dataclasses.replace(
        session.spec,
        command=(PROGRAM,),
        module=True,
        max_restarts=0,
        environment={**session.spec.environment, **environment},
    )
    findings: list[Finding] = []
    output.lines.clear()
    job = Attempt(session, nodes, attempt)
    try:
        preparing = (session.prepare_one(node, spec=spec) for node in nodes)
        await session.waiting.unless_stopped(asyncio.gather(*preparing))
        async with session.waiting.reporting(output.progress), asyncio.timeout(DEADLINE_S):
            failure = await job.run()
        findings += [failure] if failure is not None else []
    except TimeoutError:  # the records show which ranks did not end
        await job.end()
        if not records_from(output.lines):
            findings.append(finding("ranks-silent", deadline_s=DEADLINE_S))
    except MusterError as error:  # no common rendezvous address, or a host is lost
        await job.end()
        findings += from_error(error)
    return _named_records(output.lines, nodes), findings


def _named_records(lines: Sequence[str], nodes: Sequence[ConnectedHost]) -> list[RankRecord]:
    """Return the records with the names that the user gave to the hosts instead of their own."""
    records = []
    for record in records_from(lines):
        if record.node is not None and 0 <= record.node < len(nodes):
            record = msgspec.structs.replace(record, host=nodes[record.node].name)
        records.append(record)
    return records
