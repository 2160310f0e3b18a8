"""A session with the hosts of a run: prepare them, start their ranks, watch, stop, release.

It does not know how hosts are reached (the transport does), how a host starts its ranks (the node agent
does) or what the ranks do: a run (``job_runner.py``) and a check of the group both use it. Every wait has
a timeout and reports what it is waiting for.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Finding
from torchmuster.launch import protocol
from torchmuster.launch.hangs.monitor import HangMonitor
from torchmuster.launch.history import evidence, host_logs, root_cause, run_state
from torchmuster.launch.history.resume import ResumePlan, with_arguments
from torchmuster.launch.history.script_metrics import ScriptMetrics
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import compare_nodes
from torchmuster.launch.launcher.console import show_findings
from torchmuster.launch.launcher.hosts import LOCAL_WITHIN_S, Hosts
from torchmuster.launch.launcher.node_handle import NodeHandle, WaitingMessages
from torchmuster.launch.launcher.rendezvous_address import (
    RendezvousAddress,
    choose_rendezvous_address,
)
from torchmuster.launch.launcher.silence import SilenceWatch
from torchmuster.launch.launcher.stopping import (
    StopCause,
    asked_elsewhere,
    saved_by_ranks,
    waiting_text,
)
from torchmuster.launch.launcher.traceback_filter import TracebackFilter
from torchmuster.launch.network.reach import name_several
from torchmuster.launch.node.process_cleanup import GRACE_VARIABLE
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import plural

logger = logging.getLogger(__name__)

_PREPARED_WITHIN_S, _STARTED_WITHIN_S = 60.0, 30.0
# A lost host keeps its device lease until it notices the loss.
_PREPARED_AGAIN_WITHIN_S = 30.0
# How long a host may take to stop beyond the grace period before it is declared lost.
_END_WITHIN_S = 8.0
# Ranks of muster train cannot save together without the ranks of a lost host: before another host replaces it, they get this long.
_TAKEOVER_GRACE_S = 2.0
_MACHINES_SHOWN = 16
_DEVICES_NOTED = 16  # of each of them


class Console(Protocol):
    """Where the output of the ranks goes."""

    def world(self, size: int) -> None:
        """Set the number of ranks."""

    def output(self, rank: int, text: str) -> None:
        """Print what a rank wrote."""


def environment_of(spec: JobSpec) -> dict[str, str]:
    """Return the environment variables for the ranks of a job on every host."""
    return {GRACE_VARIABLE: str(max(1, math.ceil(spec.limits.grace_s)))} | spec.environment


class Session:
    """The hosts of one run, from the first connection until they are released."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        console: Console,
        *,
        run: RunFolder,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._console = console
        self._run = run
        self._run_path = str(run.path.resolve())
        self._on_phase = on_phase
        self._metrics = ScriptMetrics(run)
        self.token = os.urandom(16).hex()
        self.cause: StopCause | None = None  # of a stop request to the launcher
        self.failed_before_stop = False  # a rank had failed when the stop was requested
        self.killed_at_once = False  # because of a second request
        self.noticed_unix_s = 0.0  # when the last failure was noticed
        self._warned = False  # the first request was a warning: the next one is not a repetition
        self._kill_at_s = math.inf
        self.current: Sequence[NodeHandle] = ()  # the hosts of the last attempt
        self._silence = SilenceWatch()
        self._tracebacks = TracebackFilter(console.output)
        self._attempt = 0
        self._command = spec.command  # with the arguments to resume
        self._first_step = 0
        self._hang_monitor: HangMonitor | None = None
        self._address: RendezvousAddress | None = None  # of the last attempt
        self._many = len(transport.places) > 1
        self._sending: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references
        self.waiting = WaitingMessages()
        self.hosts = Hosts(spec, transport, self.waiting, token=self.token, on_output=self._output)

    def _patience_s(self, limit_s: float) -> float:
        """Return how long to wait for a host's answer."""
        return limit_s if self._many or self._spec.hosts else max(limit_s, LOCAL_WITHIN_S)

    def stop(self, origin: str, *, warned_s: float | None = None) -> None:
        """Request a stop of the run; a second request kills the ranks.

        ``warned_s``: this is only a scheduler's warning, and the ranks may take this long.
        """
        again = self.waiting.stopped
        if not again:
            stopping = [host.stopping for host in self.current if host.stopping]
            self.failed_before_stop = any(not state.asked for state in stopping)
        self.killed_at_once = again and not self._warned
        grace_s = self._spec.limits.grace_s if warned_s is None else warned_s
        self._kill_by(0.0 if self.killed_at_once else grace_s)
        self.cause = self.cause or StopCause(origin=origin)
        self._warned = warned_s is not None
        self.waiting.stop()
        if again:
            self._send_stop(self.current, origin)

    def _kill_by(self, grace_s: float) -> None:
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)

    def _send_stop(self, hosts: Sequence[NodeHandle], why: str) -> None:
        left_s = max(0.0, self._kill_at_s - time.monotonic())
        for host in hosts:
            self._later(host.stop(left_s, why))

    def handles(self, name: str) -> bool:
        """Return whether every rank is known to handle a signal."""
        ranks = sum(host.prepared.ranks for host in self.current if host.prepared)
        heartbeats = [beat for host in self.current for beat in host.heartbeats]
        return ranks == len(heartbeats) > 0 and all(name in beat.handles for beat in heartbeats)

    def is_replaced(self, name: str) -> bool:
        """Return whether native code has replaced a rank's handler for a signal."""
        heartbeats = [beat for host in self.current for beat in host.heartbeats]
        return any(name in beat.replaced for beat in heartbeats)

    def pass_on(self, name: str) -> None:
        """Forward a signal to every rank."""
        for host in self.current:
            self._later(host.channel.send(protocol.Signal(name=name)))

    def resume_script(self, plan: ResumePlan | None, *, again: bool) -> bool:
        """Set the script's arguments for the next attempt; return whether the hosts must be prepared anew.

        The first attempt resumes only in the folder of an earlier run (a requeued Slurm job).
        """
        resumes = plan is not None and (again or plan.checkpoint is not None)
        arguments = plan.on_restart() if plan is not None and resumes else ()
        newest = plan.checkpoint if plan is not None and arguments else None
        self._first_step = newest.step if newest is not None else 0
        before, self._command = self._command, with_arguments(self._spec.command, arguments)
        # With arguments also if nothing changed: the last preparation may have been interrupted.
        return self._command != before or bool(arguments)

    # ---- before the start

    async def prepare(self, hosts: Sequence[NodeHandle], *, again: bool = False) -> None:
        """Have the hosts lease devices and fingerprint the code; raise the first refusal."""
        waiting: dict[str, str] = {}

        async def prepare(host: NodeHandle) -> None:
            def note(text: str) -> None:
                waiting[host.name] = text

            await self.prepare_one(host, again=again, on_waiting=note)
            waiting.pop(host.name, None)

        def describe() -> str:
            pending = [host.name for host in hosts if host.prepared is None]
            text = f"waiting for devices on {', '.join(pending[:8])}"
            if waiting:
                reasons = "; ".join(f"{name}: {why}" for name, why in waiting.items())
                text += f" ({reasons})"
            return text

        async with self.waiting.telling(describe):
            await self._each(hosts, prepare)

    async def prepare_one(
        self,
        host: NodeHandle,
        *,
        spec: JobSpec | None = None,
        again: bool = False,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare one host for the job, or for another job on the same devices."""
        host.prepared = await host.ask(
            self._preparation(host, spec or self._spec, again=again),
            protocol.Prepared,
            within_s=None if self._spec.wait_s else self._patience_s(_PREPARED_WITHIN_S),
            on_waiting=on_waiting,
        )

    def log_reasons(self, hosts: Sequence[NodeHandle]) -> None:
        """Log the reason for each host's choice of devices, grouping hosts with the same reason."""
        names: dict[str, list[str]] = {}
        for host in hosts:
            for reason in host.prepared.reasons if host.prepared else ():
                names.setdefault(reason, []).append(host.name)
        for reason, having in names.items():
            logger.debug(f"{name_several(having)}: {reason}" if self._many else reason)

    def _preparation(self, host: NodeHandle, spec: JobSpec, *, again: bool) -> protocol.Prepare:
        host_ranks = spec.hosts[host.place].ranks if spec.hosts else None
        alone = not self._many
        return protocol.Prepare(
            run_id=self._run.id,
            # Below the token of this part: cleanup of the ranks must not kill other processes there.
            token=f"{host.part}.ranks",
            command=self._command if spec is self._spec else spec.command,
            module=spec.module,
            program=spec.program,
            folder=spec.folder,
            device=spec.device,
            ranks=host_ranks or spec.ranks,
            gpu_ids=spec.gpu_ids,
            share=spec.share,
            wait_s=max(spec.wait_s, _PREPARED_AGAIN_WITHIN_S) if again else spec.wait_s,
            environment=environment_of(spec),
            alone=alone,
            lost_after_s=None if alone else spec.limits.lost_after_s,
            typed=spec.typed,
            run=self._run_path,
        )

    def differences(self, hosts: Sequence[NodeHandle]) -> list[Finding]:
        """Return the differences between hosts, and between the code on those that are prepared."""
        described = []
        for host in hosts:
            assert host.record is not None
            described.append(
                compare_nodes.NodeDescription(
                    name=host.name,
                    record=host.record,
                    clock_offset_s=host.clock_offset_s,
                    fingerprint=host.prepared.fingerprint if host.prepared else None,
                )
            )
        return compare_nodes.compare_all_nodes(described, self._spec)

    # ---- the ranks

    def begin(self, hosts: Sequence[NodeHandle], attempt: int) -> None:
        """Forget the last attempt: these hosts run the next one."""
        self.current = hosts
        self._silence = SilenceWatch()
        self._attempt = attempt
        for host in hosts:
            host.expect(attempt)
            host.follow_metrics(lambda metrics: self._metrics.add(metrics.attempt, metrics.lines))

    async def attempt(self, hosts: Sequence[NodeHandle], attempt: int) -> Finding | None:
        """Run the rendezvous and the job once; return None on success, else the cause."""
        self.begin(hosts, attempt)
        try:
            async with self.waiting.telling(lambda: "checking that all hosts reach the first one"):
                choosing = choose_rendezvous_address(self._spec, hosts, before=self._address)
                self._address = await self.waiting.unless_stopped(choosing)
            await self._start(hosts, self._address, attempt)
        except MachineLost:
            return await self.fail(hosts)
        self._on_phase("running")
        await self._note_logs(hosts)
        self._hang_monitor = hang_monitor = HangMonitor(
            hosts,
            self._run,
            say=logger.info,
            show=show_findings,
            later=self._later,
            end_after_s=self._spec.limits.end_hangs_s,
        )
        async with self.waiting.telling(lambda: self._describe(hosts)):
            while True:
                await self.waiting.something_new(1.0)
                if any(not host.ended.good if host.ended else host.lost for host in hosts):
                    return await self.fail(hosts)
                if all(host.ended for host in hosts):
                    self._tracebacks.show_all()
                    return None
                if any(host.stopping for host in hosts):
                    continue
                self._tracebacks.show_due()
                hang_monitor.look()
                if hang_monitor.must_end:
                    return await self.fail(hosts)

    async def _note_logs(self, hosts: Sequence[NodeHandle]) -> None:
        """Record which host has which logs."""
        logs, first_rank = [], 0
        for host in hosts:
            assert host.prepared is not None
            folder, ranks = host.prepared.logs, host.prepared.ranks
            logs.append(
                host_logs.HostLogs(
                    host=host.name, first_rank=first_rank, ranks=ranks, folder=folder
                )
            )
            first_rank += ranks
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            await asyncio.to_thread(host_logs.write_hosts, self._run, logs)

    def _describe(self, hosts: Sequence[NodeHandle]) -> str:
        """Return the message that the ranks are alive or stopping, unless a hang was reported."""
        stopping = [host for host in hosts if host.stopping]
        if stopping:  # because a rank failed
            return waiting_text(stopping, time.monotonic())
        if self._hang_monitor is not None and self._hang_monitor.finding is not None:
            return ""
        return self._silence.words(beat for host in hosts for beat in host.heartbeats)

    async def _start(
        self, hosts: Sequence[NodeHandle], address: RendezvousAddress, attempt: int
    ) -> None:
        sizes = [host.prepared.ranks for host in hosts if host.prepared]
        first_ranks = [0, *itertools.accumulate(sizes)]
        world_size = sum(sizes)
        self._console.world(world_size)
        node_ranks = {host.place: node_rank for node_rank, host in enumerate(hosts)}

        async def start(host: NodeHandle) -> None:
            node_rank = node_ranks[host.place]
            message = protocol.Start(
                attempt=attempt,
                node_rank=node_rank,
                nodes=len(hosts),
                first_rank=first_ranks[node_rank],
                world_size=world_size,
                address=address.address,
                port=address.port,
                interface=address.local[node_rank].interface if self._many else None,
                max_restarts=self._spec.max_restarts,
                first_step=self._first_step,
            )
            within_s = self._patience_s(_STARTED_WITHIN_S)
            await host.ask(message, protocol.Started, within_s=within_s)

        await self._each(hosts, start)
        await self._report_start(hosts, sizes, address, attempt)

    async def _report_start(
        self,
        hosts: Sequence[NodeHandle],
        sizes: Sequence[int],
        address: RendezvousAddress,
        attempt: int,
    ) -> None:
        """Say and log what runs where."""
        spread = [f"{host.name} {size}" for host, size in zip(hosts, sizes, strict=True)]
        if len(spread) > _MACHINES_SHOWN:
            spread = [f"on {len(spread):,} hosts"]
        devices: dict[str, list[str]] = {}
        for host in hosts[:_MACHINES_SHOWN]:
            assert host.prepared is not None
            devices[host.name] = list(host.prepared.devices)[:_DEVICES_NOTED]
        text = f"{plural(sum(sizes), 'rank')} started: "
        if not self._many:
            text += f"{', '.join(devices[hosts[0].name])}; run {self._run.id}"
        elif attempt == 0:
            text += f"{', '.join(spread)}; run {self._run.id}; {address.reason}"
        else:
            text += ", ".join(spread)
        facts = {"attempt": attempt, "ranks": sum(sizes), "hosts": spread, "devices": devices}
        if self._spec.spares:
            spares = self.hosts.idle
            names = [host.name for host in spares]
            facts["spares"] = names
            text += f"; spares: {name_several(names) or 'none has joined'}"
            for host in spares[:_MACHINES_SHOWN]:
                leased = host.prepared.devices if host.prepared else ()
                devices[f"{host.name} (spare)"] = list(leased)[:_DEVICES_NOTED]
        await asyncio.to_thread(run_state.log_event, self._run, "started", **facts)
        logger.info(text)

    def _output(self, rank: int, text: str) -> None:
        self._silence.heard(text)
        self._tracebacks.output(rank, text)

    # ---- ends

    async def fail(self, hosts: Sequence[NodeHandle]) -> Finding:
        """Stop all hosts because one failed; return the root cause."""
        noticed_s, self.noticed_unix_s = time.monotonic(), time.time()
        hang = self._hang_monitor.finding if self._hang_monitor is not None else None
        await self.end(hosts)
        if self.cause is None:
            self._tracebacks.drop()  # the report shows the one that matters
        self._hang_monitor = None
        ends = [
            root_cause.NodeExit(
                host=host.name,
                ended=host.ended,
                ended_s=host.ended_s,
                lost=host.lost,
                lost_s=host.lost_s,
            )
            for host in hosts
        ]
        finding = root_cause.root_cause_of(
            ends,
            noticed_s=noticed_s,
            logs=str(self._run.logs.resolve()),
            world_size=sum(host.prepared.ranks for host in hosts if host.prepared),
            grace_s=self._spec.limits.grace_s,
            hang=hang,
        )
        if asked_elsewhere(hosts) is None and saved_by_ranks(hosts) is None:
            await asyncio.to_thread(evidence.keep_failure, self._run, self._attempt, finding, ends)
        return finding

    async def end(self, hosts: Sequence[NodeHandle], *, grace_s: float | None = None) -> None:
        """Stop the ranks on these hosts; a host that does not confirm in time is declared lost."""
        began_s = time.monotonic()
        waiting = [host for host in hosts if not host.lost and not host.ended]
        if self.cause is None:  # a failure, which an earlier attempt may have had too
            self._kill_at_s = math.inf
        if grace_s is not None or self._kill_at_s == math.inf:
            self._kill_by(self._spec.limits.grace_s if grace_s is None else grace_s)
        self._send_stop(waiting, self.cause.origin if self.cause else "")

        def describe() -> str:
            return waiting_text(waiting, time.monotonic())

        hurried = False
        async with self.waiting.telling(describe):
            # A second request brings the end forward.
            while time.monotonic() < self._kill_at_s + _END_WITHIN_S and describe():
                if not hurried and self._cannot_save(hosts):
                    hurried = True
                    self._kill_by(_TAKEOVER_GRACE_S)
                    self._send_stop(waiting, "")
                await self.waiting.something_new(0.2, although_stopped=True)
        slow = describe()
        if slow:
            logger.info(f"timed out: {slow}")
        if self.cause is not None:
            self._tracebacks.show_all()
        for host in waiting:
            if not host.ended:
                host.lose(f"it did not stop within {time.monotonic() - began_s:.0f} s")

    def _cannot_save(self, hosts: Sequence[NodeHandle]) -> bool:
        """Return whether another host replaces one that is lost, without which the other ranks cannot save."""
        is_replaced = self._spec.spares > 0 or self._spec.hosts_return
        saves_together = is_replaced and self._spec.checkpoints is not None
        return saves_together and self.cause is None and any(host.lost for host in hosts)

    async def leave(self, exit_code: int, words: str) -> None:
        """Release every host; ``words`` is printed on the terminal of a node agent that joined."""
        async with self.waiting.telling(lambda: "waiting for the node agents to exit"):
            await self.hosts.leave(exit_code, words)

    # ---- waiting

    async def _each(
        self, hosts: Sequence[NodeHandle], work: Callable[[NodeHandle], Awaitable[None]]
    ) -> None:
        """Run ``work`` on all hosts concurrently; raise the first error."""

        async def named(host: NodeHandle) -> None:
            try:
                await work(host)
            except MusterError as error:
                if self._many and not error.what.startswith(host.name):
                    error.what = f"{host.name}: {error.what}"
                raise

        tasks = [asyncio.ensure_future(named(host)) for host in hosts]
        try:
            await self.waiting.unless_stopped(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _later(self, work: Awaitable[None]) -> None:
        """Send in the background: a host that is stuck must not block the others."""

        async def send() -> None:
            try:
                await work
            except Exception as error:
                logger.info(f"a message could not be sent: {error}")

        task = asyncio.create_task(send())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
