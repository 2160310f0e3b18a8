"""One attempt: find the rendezvous address, start the ranks on these hosts, watch them, stop them, name the cause."""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchmuster.errors import MachineLost
from torchmuster.finding import Finding
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.hang_monitor import HangMonitor
from torchmuster.launch.launcher.host import ConnectedHost, HostState
from torchmuster.launch.launcher.rank_output import ShownOutput
from torchmuster.launch.launcher.stopping import agent_stop_origin, saved_by_ranks, waiting_text
from torchmuster.units import name_several, plural

if TYPE_CHECKING:
    from torchmuster.launch.launcher.session import Session

logger = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 20.0
# A lost host is noticed earlier, by its heartbeat; a loaded one answers late.
_LISTENING_WITHIN_S = 60.0
_STARTED_WITHIN_S = 30.0
# How long a host may take to stop beyond the grace period before it is declared lost.
_END_WITHIN_S = 8.0
# Ranks of muster train cannot save together without the ranks of a lost host: before another host replaces it, they get this long.
_TAKEOVER_GRACE_S = 2.0
_HOSTS_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class RendezvousAddress:
    """The chosen address, each host's own address and interface towards it, and the reason for the choice."""

    address: str
    port: int
    local: tuple[protocol.Address, ...]
    reason: str = ""


class Attempt:
    """The ranks of these hosts, from their start to their end."""

    def __init__(self, session: "Session", hosts: Sequence[ConnectedHost], number: int) -> None:
        self.hosts = hosts
        self.number = number
        self.noticed_unix_s = 0.0  # when its failure was noticed
        self._session = session
        self._spec = session.spec
        self._run = session.run_folder
        self._waiting = session.waiting
        self._output = ShownOutput(session.console.output)
        self._hang_monitor: HangMonitor | None = None
        session.attempt = self
        for host in hosts:
            host.expect(number)

    def receive(self, host: ConnectedHost, message: protocol.FromAgent) -> None:
        """Handle a message that a host sends without a request."""
        match message:
            case protocol.Output(file=""):
                self._output.add(message.rank, message.text)
            case protocol.Output(file=protocol.RECORDED):
                self._session.metrics.add(self.number, message.text)
            case protocol.Heartbeats() | protocol.Output() | protocol.Done():
                if self._hang_monitor:
                    self._hang_monitor.hear(host, message)

    async def run(self) -> Finding | None:
        """Run the rendezvous and the job once; return None on success, else the cause."""
        session, hosts = self._session, self.hosts
        try:
            async with self._waiting.reporting(
                lambda: "checking that all hosts reach the first one"
            ):
                choosing = choose_rendezvous_address(self._spec, hosts)
                address = await self._waiting.unless_stopped(choosing)
            await self._start(address)
        except MachineLost:
            return await self.fail()
        session.on_phase("running")
        self._hang_monitor = HangMonitor(
            hosts,
            self._run,
            later=session.background.start,
            end_after_s=self._spec.limits.end_hangs_s,
        )
        return await self._watch(self._hang_monitor)

    async def _watch(self, hang_monitor: HangMonitor) -> Finding | None:
        """Wait until all ranks have ended, or one fails or hangs."""
        async with self._waiting.reporting(self._describe):
            while True:
                await self._waiting.something_new(1.0)
                if any(host.has_failed for host in self.hosts):
                    return await self.fail()
                if all(host.state is HostState.ENDED for host in self.hosts):
                    self._output.show_all()
                    return None
                if any(host.stopping for host in self.hosts):
                    continue
                self._output.show_due()
                hang_monitor.look()
                if hang_monitor.must_end:
                    return await self.fail()

    def _describe(self) -> str:
        """Return the message that the ranks are alive or stopping, unless a hang was reported."""
        stopping = [host for host in self.hosts if host.stopping]
        if stopping:  # because a rank failed
            return waiting_text(stopping, time.monotonic())
        if self._hang_monitor and self._hang_monitor.finding:
            return ""
        return self._output.silence_text(beat for host in self.hosts for beat in host.heartbeats)

    async def _start(self, address: RendezvousAddress) -> None:
        session, hosts = self._session, self.hosts
        sizes = [host.prepared.ranks for host in hosts if host.prepared]
        first_ranks = [0, *itertools.accumulate(sizes)]
        session.console.world(sum(sizes))
        node_ranks = {host.place: node_rank for node_rank, host in enumerate(hosts)}

        async def start(host: ConnectedHost) -> None:
            node_rank = node_ranks[host.place]
            message = protocol.Start(
                attempt=self.number,
                node_rank=node_rank,
                nodes=len(hosts),
                first_rank=first_ranks[node_rank],
                world_size=sum(sizes),
                address=address.address,
                port=address.port,
                interface=address.local[node_rank].interface if session.is_many else None,
                max_restarts=self._spec.max_restarts,
                first_step=session.first_step,
            )
            within_s = session.patience_s(_STARTED_WITHIN_S)
            await host.ask(message, protocol.Done, within_s=within_s)

        await session.on_each(hosts, start)
        await self._report_start(sizes, address)

    async def _report_start(self, sizes: Sequence[int], address: RendezvousAddress) -> None:
        """Say and log what runs where."""
        first_rank = 0
        spread: list[str] = []
        hosts = []
        devices: dict[str, list[str]] = {}
        for host, size in zip(self.hosts, sizes, strict=True):
            assert host.prepared is not None
            spread.append(f"{host.name} {size}")
            logs = host.prepared.logs
            hosts.append(
                {"host": host.name, "first_rank": first_rank, "ranks": size, "folder": logs}
            )
            first_rank += size
            if len(devices) < _HOSTS_SHOWN:
                devices[host.name] = list(host.prepared.devices)
        where = spread if self._session.is_many else devices[self.hosts[0].name]
        if len(where) > _HOSTS_SHOWN and self._session.is_many:
            where = [f"on {len(spread):,} hosts"]
        text = f"{plural(first_rank, 'rank')} started: {', '.join(where)}"
        facts: dict[str, Any] = {"attempt": self.number, "ranks": first_rank, "hosts": hosts}
        if self._spec.spares:
            facts["spares"] = [host.name for host in self._session.hosts.idle]
            text += f"; spares: {name_several(facts['spares']) or 'none has joined'}"
        await asyncio.to_thread(
            run_state.log_event, self._run, "started", what=text, devices=devices, **facts
        )
        text += f"; run {self._run.id}"
        if self.number == 0 and address.reason:
            text += f"; {address.reason}"
        logger.info(text)

    # ---- ends

    async def fail(self) -> Finding:
        """Stop all hosts because one failed; return the root cause."""
        from torchmuster.launch.history import evidence, root_cause

        hosts = self.hosts
        noticed_s, self.noticed_unix_s = time.monotonic(), time.time()
        hang = self._hang_monitor.finding if self._hang_monitor else None
        await self.end()
        if self._session.cause is None:
            self._output.drop()  # the report shows the one that matters
        self._hang_monitor = None
        ends = [
            root_cause.NodeExit(
                host=host.name,
                ended=host.ended,
                ended_s=host.ended_s,
                lost=host.why_lost or "",
                lost_s=host.lost_s,
            )
            for host in hosts
        ]
        finding, _ = root_cause.root_cause_of(
            ends,
            noticed_s=noticed_s,
            logs=str(self._run.logs.resolve()),
            world_size=sum(host.prepared.ranks for host in hosts if host.prepared),
            grace_s=self._spec.limits.grace_s,
            hang=hang,
        )
        if agent_stop_origin(hosts) is None and saved_by_ranks(hosts) is None:
            await asyncio.to_thread(evidence.log_failure, self._run, self.number, finding, ends)
        return finding

    async def end(self, *, grace_s: float | None = None) -> None:
        """Stop the ranks; a host that does not confirm in time is declared lost."""
        session = self._session
        began_s = time.monotonic()
        waiting = [host for host in self.hosts if not host.is_lost and not host.ended]
        if session.cause is None:  # a failure, which an earlier attempt may have had too
            session.kill_at_s = math.inf
            if self._cannot_save():
                session.kill_by(_TAKEOVER_GRACE_S)
        if grace_s is not None or session.kill_at_s == math.inf:
            session.kill_by(self._spec.limits.grace_s if grace_s is None else grace_s)
        session.send_stop(waiting, session.cause.origin if session.cause else "")

        def describe() -> str:
            return waiting_text(waiting, time.monotonic())

        async with self._waiting.reporting(describe):
            # A second request brings the end forward.
            while time.monotonic() < session.kill_at_s + _END_WITHIN_S and describe():
                await self._waiting.something_new(0.2, although_stopped=True)
        slow = describe()
        if slow:
            logger.info(f"timed out: {slow}")
        if session.cause is not None:
            self._output.show_all()
        for host in waiting:
            if not host.ended:
                host.lose(f"it did not stop within {time.monotonic() - began_s:.0f} s")

    def _cannot_save(self) -> bool:
        """Return whether another host replaces one that is lost, without which the other ranks cannot save."""
        is_replaced = self._spec.spares > 0 or self._spec.hosts_return
        saves_together = is_replaced and self._spec.checkpoints is not None
        return saves_together and any(host.is_lost for host in self.hosts)


async def choose_rendezvous_address(
    spec: JobSpec, hosts: Sequence[ConnectedHost]
) -> RendezvousAddress:
    """Open the port on the first host, and choose the address at which all others reach it."""
    first, *other_hosts = hosts
    nonce, limit_s = os.urandom(16).hex(), spec.limits.reach_s
    listening = await first.ask(
        protocol.Listen(nonce=nonce, port=spec.port, address=spec.address),
        protocol.Listening,
        within_s=_LISTENING_WITHIN_S,
    )
    if not other_hosts:
        only = listening.addresses[0]
        return RendezvousAddress(address=only.address, port=listening.port, local=(only,))
    from torchmuster.launch.network import reach

    assert first.record is not None
    targets = [protocol.Target(address=a.address, port=listening.port) for a in listening.addresses]
    request = protocol.Reach(nonce=nonce, targets=tuple(targets), timeout_s=limit_s)
    replies = await asyncio.gather(
        *(
            host.ask(request, protocol.Reached, within_s=limit_s + _ANSWER_WITHIN_S)
            for host in other_hosts
        )
    )
    answers = [(host.name, reply) for host, reply in zip(other_hosts, replies, strict=True)]
    chosen = reach.choose_address(
        first.name, first.record.system, listening, answers, timeout_s=limit_s
    )
    local = [own for own in listening.addresses if own.address == chosen.value]
    for reply in replies:
        end = reach.local_end(reply, chosen.value)
        assert end is not None  # it reached the chosen address
        local.append(end)
    return RendezvousAddress(
        address=chosen.value,
        port=listening.port,
        local=tuple(local),
        reason=f"rendezvous at {chosen.reason}; {listening.reason}",
    )
