"""A session with the hosts of a run: connect, prepare, rendezvous, start, monitor, stop, release.

It does not know how hosts are reached (the transport does), how a host starts its ranks (the node agent
does) or what the ranks do: a run (``job_runner.py``) and a check of the group both use it. Every wait has
a timeout and reports what it is waiting for.
"""

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Finding
from torchmuster.launch import protocol
from torchmuster.launch.hangs.monitor import HangMonitor
from torchmuster.launch.history import evidence, host_logs, root_cause, run_state
from torchmuster.launch.history.resume import ResumePlan, with_arguments
from torchmuster.launch.history.script_metrics import ScriptMetrics
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import compare_nodes, node_handle
from torchmuster.launch.launcher.node_handle import NodeHandle, WaitingMessages
from torchmuster.launch.launcher.node_registry import NodeRegistry
from torchmuster.launch.launcher.rendezvous_address import (
    RendezvousAddress,
    choose_rendezvous_address,
)
from torchmuster.launch.launcher.silence import SilenceWatch
from torchmuster.launch.launcher.stopping import StopCause, waiting_text
from torchmuster.launch.network.reach import name_several
from torchmuster.launch.node.process_cleanup import GRACE_VARIABLE
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import plural

_PREPARED_WITHIN_S, _STARTED_WITHIN_S = 60.0, 30.0
# The node agent of this host is a child process: its death is noticed at once, and under load it may need long.
_LOCAL_WITHIN_S = 1800.0
# How long a host may take to stop beyond the grace period before it is declared lost.
_END_WITHIN_S = 8.0
# Ranks of muster train cannot save together without the ranks of a lost host: before another host replaces it, they get this long.
_TAKEOVER_GRACE_S = 2.0
_MACHINES_SHOWN = 16
_DEVICES_NOTED = 16  # of each of them


class Console(Protocol):
    """How the launcher prints."""

    def say(self, text: str) -> None:
        """Print a message of the launcher."""

    def world(self, size: int) -> None:
        """Set the number of ranks."""

    def output(self, rank: int, text: str) -> None:
        """Print what a rank wrote."""

    def show(self, findings: Sequence[Finding]) -> None:
        """Print findings."""


def environment_of(spec: JobSpec) -> dict[str, str]:
    """Return the environment variables for the ranks of a job on every host."""
    return {GRACE_VARIABLE: str(max(1, math.ceil(spec.limits.grace_s)))} | spec.environment


class Session:
    """The hosts of one run, from the node registry until they are released."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        console: Console,
        *,
        run_id: str,
        logs: str,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._console = console
        self._run_id = run_id
        self._logs = logs
        self._run = RunFolder(Path(logs).parent)
        self._metrics = ScriptMetrics(self._run)
        self.token = os.urandom(16).hex()
        self._on_phase = on_phase
        self.cause: StopCause | None = None  # of a stop request to the launcher
        self.failed_before_stop = False  # a rank had failed when the stop was requested
        self.killed_at_once = False  # because of a second request
        self.noticed_unix_s = 0.0  # when the last failure was noticed
        self._warned = False  # the first request was a warning: the next one is not a repetition
        self._kill_at_s = math.inf
        self._silence = SilenceWatch()
        self._attempt = 0
        self._command = spec.command  # with the arguments to resume
        self._first_step = 0
        self._hang_monitor: HangMonitor | None = None
        self._many = len(transport.places) > 1
        self._address: RendezvousAddress | None = None  # of the last attempt
        self.waiting = WaitingMessages(console.say)
        self.registry = NodeRegistry(
            transport,
            self.waiting,
            token=self.token,
            join_s=self._patience_s(spec.limits.join_s),
            # A pipe to this host closes by itself; only a network connection can go silent.
            lost_after_s=spec.limits.lost_after_s if self._many else None,
            on_output=self._output,
            enough=spec.min_nodes,
            return_s=spec.limits.return_s,
            spares=spec.spares,
        )

    def _patience_s(self, limit_s: float) -> float:
        """Return how long to wait for a host's answer."""
        return limit_s if self._many or self._spec.hosts else max(limit_s, _LOCAL_WITHIN_S)

    def stop(self, origin: str, *, warned_s: float | None = None) -> None:
        """Request a stop of the run; a second request kills the ranks.

        ``warned_s``: this is only a scheduler's warning, and the ranks may take this long.
        """
        again = self.waiting.stopped
        if not again:
            stopping = [node.stopping for node in self.registry.nodes if node.stopping]
            self.failed_before_stop = any(not one.asked for one in stopping)
        self.killed_at_once = again and not self._warned
        grace_s = self._spec.limits.grace_s if warned_s is None else warned_s
        self._kill_by(0.0 if self.killed_at_once else grace_s)
        self.cause = self.cause or StopCause(origin=origin)
        self._warned = warned_s is not None
        self.waiting.stop()
        if again:
            for node in self.registry.nodes:
                self._later(node.stop(self._left_s(), origin))

    def _kill_by(self, grace_s: float) -> None:
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)

    def _left_s(self) -> float:
        return max(0.0, self._kill_at_s - time.monotonic())

    def handles(self, name: str) -> bool:
        """Return whether every rank is known to handle a signal."""
        ranks = sum(node.prepared.ranks for node in self.registry.nodes if node.prepared)
        heard = [one for node in self.registry.nodes for one in node.heartbeats]
        return ranks == len(heard) > 0 and all(name in one.handles for one in heard)

    def is_replaced(self, name: str) -> bool:
        """Return whether native code has replaced a rank's handler for a signal."""
        heard = (one for node in self.registry.nodes for one in node.heartbeats)
        return any(name in one.replaced for one in heard)

    def pass_on(self, name: str) -> None:
        """Forward a signal to every rank."""
        for node in self.registry.nodes:
            self._later(node.channel.send(protocol.Signal(name=name)))

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

    async def prepare(self, nodes: Sequence[NodeHandle], *, again: bool = False) -> None:
        """Have the hosts lease devices and fingerprint the code; raise the first refusal."""
        waiting: dict[str, str] = {}

        async def prepare(node: NodeHandle) -> None:
            await self.prepare_one(
                node,
                again=again,
                on_waiting=lambda words: waiting.__setitem__(node.name, words),
            )
            waiting.pop(node.name, None)

        def words() -> str:
            pending = [node.name for node in nodes if node.prepared is None]
            blocked = "; ".join(f"{name}: {text}" for name, text in waiting.items())
            return f"waiting for devices on {', '.join(pending[:8])}" + (
                f" ({blocked})" if blocked else ""
            )

        async with self.waiting.telling(words):
            await self._each(nodes, prepare)

    async def prepare_one(
        self,
        node: NodeHandle,
        *,
        spec: JobSpec | None = None,
        again: bool = False,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare one host for the job, or for another job on the same devices."""
        node.prepared = await node.ask(
            self._preparation(node, spec or self._spec, again=again),
            protocol.Prepared,
            within_s=None if self._spec.wait_s else self._patience_s(_PREPARED_WITHIN_S),
            on_waiting=on_waiting,
        )

    def say_reasons(self, nodes: Sequence[NodeHandle]) -> None:
        """Print the reason for each host's choice of devices, grouping hosts with the same reason."""
        machines: dict[str, list[str]] = {}
        for node in nodes:
            for reason in node.prepared.reasons if node.prepared else ():
                machines.setdefault(reason, []).append(node.name)
        for reason, names in machines.items():
            self._console.say(f"{name_several(names)}: {reason}" if self._many else reason)

    def _preparation(self, node: NodeHandle, spec: JobSpec, *, again: bool) -> protocol.Prepare:
        host_ranks = spec.hosts[node.place].ranks if spec.hosts else None
        alone = not self._many
        return protocol.Prepare(
            run_id=self._run_id,
            # Below the token of this part: cleanup of the ranks must not kill other processes there.
            token=f"{node.part}.ranks",
            command=self._command if spec is self._spec else spec.command,
            module=spec.module,
            program=spec.program,
            folder=spec.folder,
            device=spec.device,
            ranks=host_ranks or spec.ranks,
            gpu_ids=spec.gpu_ids,
            share=spec.share,
            # A lost host keeps its device lease until it notices the loss.
            wait_s=max(spec.wait_s, 30.0) if again else spec.wait_s,
            environment=environment_of(spec),
            alone=alone,
            lost_after_s=None if alone else spec.limits.lost_after_s,
            typed=spec.typed,
            run=str(self._run.path.resolve()),
        )

    def differences(self, nodes: Sequence[NodeHandle]) -> list[Finding]:
        """Return the differences between prepared hosts."""
        described = [_described(node) for node in nodes]
        return compare_nodes.compare_all_nodes(described, self._spec)

    def differing_records(self, nodes: Sequence[NodeHandle]) -> list[Finding]:
        """Return the differences between hosts that have only joined the node registry."""
        return compare_nodes.compare_all_nodes([_described(node) for node in nodes], self._spec)

    # ---- the ranks

    async def attempt(self, nodes: Sequence[NodeHandle], attempt: int) -> Finding | None:
        """Run the rendezvous and the job once; return None on success, else the cause."""
        self._silence = SilenceWatch()
        self._attempt = attempt
        for node in nodes:
            node.expect(attempt)
            node.follow_metrics(lambda told: self._metrics.add(told.attempt, told.lines))
        try:
            async with self.waiting.telling(lambda: "checking that all hosts reach the first one"):
                choosing = choose_rendezvous_address(self._spec, nodes, before=self._address)
                self._address = await self.waiting.unless_stopped(choosing)
            if attempt == 0 and self._many:
                self._console.say(self._address.reason)
            await self._start(nodes, self._address, attempt)
        except MachineLost:
            return await self.fail(nodes)
        self._on_phase("running")
        await self._note_logs(nodes)
        self._hang_monitor = hang_monitor = self._look_out(nodes)
        async with self.waiting.telling(self._words):
            while True:
                await self.waiting.something_new(1.0)
                if any(not node.ended.good if node.ended else node.lost for node in nodes):
                    return await self.fail(nodes)
                if all(node.ended for node in nodes):
                    return None
                if any(node.stopping for node in nodes):
                    continue
                hang_monitor.look()
                if hang_monitor.must_end:
                    return await self.fail(nodes)

    async def _note_logs(self, nodes: Sequence[NodeHandle]) -> None:
        """Record which host has which logs."""
        hosts, first_rank = [], 0
        for node in nodes:
            assert node.prepared is not None
            folder, ranks = node.prepared.logs, node.prepared.ranks
            hosts.append(
                host_logs.HostLogs(
                    host=node.name, first_rank=first_rank, ranks=ranks, folder=folder
                )
            )
            first_rank += ranks
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            await asyncio.to_thread(host_logs.write_hosts, self._run, hosts)

    def _look_out(self, nodes: Sequence[NodeHandle]) -> HangMonitor:
        return HangMonitor(
            nodes,
            self._run,
            say=self._console.say,
            show=self._console.show,
            later=self._later,
            end_after_s=self._spec.limits.end_hangs_s,
        )

    def _words(self) -> str:
        """Return the message that the ranks are alive or stopping, unless a hang was reported."""
        nodes = self.registry.nodes
        if any(node.stopping for node in nodes):  # because a rank failed
            return waiting_text([node for node in nodes if node.stopping], time.monotonic())
        if self._hang_monitor is not None and self._hang_monitor.finding is not None:
            return ""
        return self._silence.words(one for node in nodes for one in node.heartbeats)

    async def _start(
        self, nodes: Sequence[NodeHandle], meeting: RendezvousAddress, attempt: int
    ) -> None:
        sizes = [node.prepared.ranks for node in nodes if node.prepared]
        first_ranks = [0, *itertools.accumulate(sizes)]
        world_size = sum(sizes)
        self._console.world(world_size)
        # Not the node's place number: another host may be missing.
        order = {node.place: number for number, node in enumerate(nodes)}

        async def start(node: NodeHandle) -> None:
            place = order[node.place]
            message = protocol.Start(
                attempt=attempt,
                node_rank=place,
                nodes=len(nodes),
                first_rank=first_ranks[place],
                world_size=world_size,
                address=meeting.address,
                port=meeting.port,
                interface=meeting.local[place].interface if self._many else None,
                max_restarts=self._spec.max_restarts,
                first_step=self._first_step,
            )
            await node.start(message, within_s=self._patience_s(_STARTED_WITHIN_S))

        await self._each(nodes, start)
        spread = [f"{node.name} {size}" for node, size in zip(nodes, sizes, strict=True)]
        if len(spread) > _MACHINES_SHOWN:
            spread = [f"on {len(spread):,} hosts"]
        count = plural(world_size, "rank")
        self._console.say(f"{count} started" + (f": {', '.join(spread)}" if self._many else ""))
        devices = {
            node.name: list(node.prepared.devices)[:_DEVICES_NOTED]
            for node in nodes[:_MACHINES_SHOWN]
            if node.prepared is not None
        }
        facts = {"attempt": attempt, "ranks": world_size, "hosts": spread, "devices": devices}
        if self._spec.spares:
            spares = self.registry.spares
            facts["spares"] = [node.name for node in spares]
            for node in spares[:_MACHINES_SHOWN]:
                leased = node.prepared.devices if node.prepared else ()
                devices[f"{node.name} (spare)"] = list(leased)[:_DEVICES_NOTED]
        await asyncio.to_thread(run_state.log_event, self._run, "started", **facts)

    def _output(self, rank: int, text: str) -> None:
        self._silence.heard(text)
        self._console.output(rank, text)

    # ---- ends

    async def fail(self, nodes: Sequence[NodeHandle]) -> Finding:
        """Stop all hosts because one failed; return the root cause."""
        noticed_s, self.noticed_unix_s = time.monotonic(), time.time()
        hang = self._hang_monitor.finding if self._hang_monitor is not None else None
        await self.end(nodes)
        self._hang_monitor = None
        ends = [
            root_cause.NodeExit(
                host=node.name,
                ended=node.ended,
                ended_s=node.ended_s,
                lost=node.lost,
                lost_s=node.lost_s,
            )
            for node in nodes
        ]
        finding = root_cause.root_cause_of(
            ends,
            noticed_s=noticed_s,
            logs=self._logs,
            world_size=sum(node.prepared.ranks for node in nodes if node.prepared),
            grace_s=self._spec.limits.grace_s,
            hang=hang,
        )
        planned = node_handle.asked_elsewhere(nodes)
        if not planned and not node_handle.trouble_text(nodes):
            await asyncio.to_thread(evidence.keep_failure, self._run, self._attempt, finding, ends)
        return finding

    async def end(self, nodes: Sequence[NodeHandle], *, grace_s: float | None = None) -> None:
        """Stop the ranks on these hosts; a host that does not confirm in time is declared lost."""
        began_s = time.monotonic()
        waiting = [node for node in nodes if not node.lost and not node.ended]
        if self.cause is None:  # a failure, which an earlier attempt may have had too
            self._kill_at_s = math.inf
        if grace_s is not None or self._kill_at_s == math.inf:
            self._kill_by(self._spec.limits.grace_s if grace_s is None else grace_s)
        for node in waiting:
            self._later(node.stop(self._left_s(), self.cause.origin if self.cause else ""))

        def words() -> str:
            return waiting_text(waiting, time.monotonic())

        hurried = False
        async with self.waiting.telling(words):
            # A second request brings the end forward.
            while time.monotonic() < self._kill_at_s + _END_WITHIN_S and words():
                if not hurried and self._cannot_save(nodes):
                    hurried = True
                    self._kill_by(_TAKEOVER_GRACE_S)
                    for node in waiting:
                        self._later(node.stop(self._left_s(), ""))
                await self.waiting.something_new(0.2, although_stopped=True)
        if slow := words():
            self._console.say(f"timed out: {slow}")
        for node in waiting:
            if not node.ended:
                node.lose(f"it did not stop within {time.monotonic() - began_s:.0f} s")

    def _cannot_save(self, nodes: Sequence[NodeHandle]) -> bool:
        """Return whether another host replaces one that is lost, without which the other ranks cannot save."""
        is_replaced = self._spec.spares > 0 or self._spec.hosts_return
        saves_together = is_replaced and self._spec.checkpoints is not None
        return saves_together and self.cause is None and any(node.lost for node in nodes)

    async def leave(self, exit_code: int, words: str) -> None:
        """Release every host; ``words`` is printed on the terminal of a node agent that joined."""
        async with self.waiting.telling(lambda: "waiting for the node agents to exit"):
            await self.registry.leave(exit_code, words)

    # ---- waiting

    async def _each(
        self, nodes: Sequence[NodeHandle], work: Callable[[NodeHandle], Awaitable[None]]
    ) -> None:
        """Run ``work`` on all hosts concurrently; raise the first error."""

        async def named(node: NodeHandle) -> None:
            try:
                await work(node)
            except MusterError as error:
                if self._many and not error.what.startswith(node.name):
                    error.what = f"{node.name}: {error.what}"
                raise

        tasks = [asyncio.ensure_future(named(node)) for node in nodes]
        try:
            await self.waiting.unless_stopped(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _later(self, work: Awaitable[None]) -> None:
        """Send in the background: a host that is stuck must not block the others."""
        task = asyncio.ensure_future(work)
        _PENDING.add(task)
        task.add_done_callback(_PENDING.discard)


# The event loop keeps only weak references to tasks.
_PENDING: set["asyncio.Future[None]"] = set()


def _described(node: NodeHandle) -> compare_nodes.NodeDescription:
    assert node.record is not None
    return compare_nodes.NodeDescription(
        name=node.name,
        record=node.record,
        clock_offset_s=node.clock_offset_s,
        fingerprint=node.prepared.fingerprint if node.prepared else None,
    )
