"""What a run and a check of the group share: the connected hosts, their preparation, and the request to stop.

It does not know how hosts are reached (the transport does), how a host starts its ranks (the node agent
does) or what the ranks do. Every wait has a timeout and reports what it is waiting for.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Status
from torchmuster.launch import protocol
from torchmuster.launch.history.script_metrics import ScriptMetrics
from torchmuster.launch.job import GRACE_VARIABLE, JobSpec
from torchmuster.launch.launcher.console import Console, show_findings
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.hosts import LOCAL_WITHIN_S, Hosts
from torchmuster.launch.launcher.stopping import StopCause
from torchmuster.launch.launcher.waiting import BackgroundTasks, Waiting
from torchmuster.launch.transports.channel import Transport
from torchmuster.runfolder import RunFolder
from torchmuster.units import name_several

if TYPE_CHECKING:
    from torchmuster.launch.history.resume import ResumePlan
    from torchmuster.launch.launcher.attempt import Attempt

logger = logging.getLogger(__name__)

_PREPARED_WITHIN_S = 60.0
_PREPARED_AGAIN_WITHIN_S = 30.0


def environment_of(spec: JobSpec) -> dict[str, str]:
    """Return the environment variables for the ranks of a job on every host."""
    return {GRACE_VARIABLE: str(max(1, math.ceil(spec.limits.grace_s)))} | spec.environment


class Session:
    """The hosts of one run, from the first connection until they are released."""

    def __init__(
        self, spec: JobSpec, transport: Transport, console: Console, run: RunFolder
    ) -> None:
        self.spec = spec
        self.console = console
        self.run_folder = run
        self.is_many = len(transport.places) > 1
        self.metrics = ScriptMetrics(run)
        self.on_phase: Callable[[str], None] = lambda _: None
        self.token = os.urandom(16).hex()
        self.waiting = Waiting()
        self.hosts = Hosts(
            spec, transport, self.waiting, token=self.token, on_message=self._receive
        )
        self.attempt: Attempt | None = None  # the last one
        self.command = spec.command  # with the arguments to resume
        self.first_step = 0
        self.cause: StopCause | None = None  # of a stop request to the launcher
        self.failed_before_stop = False  # a rank had failed when the stop was requested
        self.killed_at_once = False  # because of a second request
        self.kill_at_s = math.inf
        self._is_prepared = False  # the hosts of the first attempt are
        self._is_only_warned = False  # the next request is then not a repetition
        self.background = BackgroundTasks()  # a host that is stuck must not block the others

    def _receive(self, host: ConnectedHost, message: protocol.FromAgent) -> None:
        if self.attempt is not None:
            self.attempt.receive(host, message)

    @property
    def current(self) -> Sequence[ConnectedHost]:
        """The hosts of the last attempt."""
        return () if self.attempt is None else self.attempt.hosts

    def patience_s(self, limit_s: float) -> float:
        """Return how long to wait for a host's answer."""
        return limit_s if self.is_many or self.spec.hosts else max(limit_s, LOCAL_WITHIN_S)

    # ---- requests to stop, and signals

    def stop(self, origin: str, *, warned_s: float | None = None) -> None:
        """Request a stop of the run; a second request kills the ranks.

        ``warned_s``: this is only a scheduler's warning, and the ranks may take this long.
        """
        again = self.waiting.stopped
        if not again:
            stopping = [host.stopping for host in self.current if host.stopping]
            self.failed_before_stop = any(not state.stop_signal for state in stopping)
            if not self.failed_before_stop:
                self.kill_at_s = math.inf  # that of an earlier attempt is over
        self.killed_at_once = again and not self._is_only_warned
        grace_s = self.spec.limits.grace_s if warned_s is None else warned_s
        self.kill_by(0.0 if self.killed_at_once else grace_s)
        self.cause = self.cause or StopCause(origin=origin)
        self._is_only_warned = warned_s is not None
        self.waiting.stop()
        if again:
            self.send_stop(self.current, origin)

    def kill_by(self, grace_s: float) -> None:
        """Bring the time at which the ranks are killed forward."""
        self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)

    def send_stop(self, hosts: Sequence[ConnectedHost], why: str) -> None:
        """Ask hosts to stop their ranks until the time at which they are killed."""
        left_s = max(0.0, self.kill_at_s - time.monotonic())
        for host in hosts:
            self.background.start(host.stop(left_s, why))

    def handles(self, name: str) -> bool:
        """Return whether every rank is known to handle a signal."""
        ranks = sum(host.prepared.ranks for host in self.current if host.prepared)
        heartbeats = [beat for host in self.current for beat in host.heartbeats]
        return ranks == len(heartbeats) > 0 and all(name in beat.handles for beat in heartbeats)

    def pass_on(self, name: str) -> None:
        """Forward a signal to every rank."""
        for host in self.current:
            self.background.start(host.channel.send(protocol.Signal(name=name)))

    def resume_script(self, plan: "ResumePlan | None", *, again: bool) -> bool:
        """Set the script's arguments for the next attempt; return whether the hosts must be prepared anew.

        The first attempt resumes only in the folder of an earlier run (a requeued Slurm job).
        """
        if plan is None and self.command == self.spec.command:
            return False
        resumes = plan is not None and (again or plan.checkpoint is not None)
        arguments = plan.on_restart() if plan is not None and resumes else ()
        newest = plan.checkpoint if plan is not None and arguments else None
        self.first_step = newest.step if newest is not None else 0
        before, self.command = self.command, (*self.spec.command, *arguments)
        # With arguments also if nothing changed: the last preparation may have been interrupted.
        return self.command != before or bool(arguments)

    # ---- before the start

    async def prepare(self, hosts: Sequence[ConnectedHost]) -> None:
        """Have the hosts lease devices and fingerprint the code, and compare all hosts; raise the first refusal."""

        def describe() -> str:
            pending = [host for host in hosts if host.prepared is None]
            text = f"waiting for devices on {name_several([host.name for host in pending])}"
            reasons = [f"{host.name}: {host.waiting_for}" for host in pending if host.waiting_for]
            return f"{text} ({'; '.join(reasons)})" if reasons else text

        async with self.waiting.reporting(describe):
            try:
                await self.on_each(hosts, self.prepare_one)
            finally:
                self._is_prepared = True
        if not self.is_many:
            return
        here = [host for host in self.hosts.all if host.is_here and host.prepared is not None]
        from torchmuster.launch.launcher import compare_nodes

        findings = compare_nodes.compare_all_nodes(here, self.spec)
        failures = [finding for finding in findings if finding.status is Status.FAILURE]
        show_findings([finding for finding in findings if finding not in failures[:1]])
        if failures:
            raise Impossible(failures[0].what, why=failures[0].why, fix=failures[0].fix)

    async def prepare_one(self, host: ConnectedHost, *, spec: JobSpec | None = None) -> None:
        """Prepare one host for the job, or for another job on the same devices."""
        host.prepared = await host.ask(
            self._preparation(host, spec or self.spec),
            protocol.Prepared,
            within_s=None if self.spec.wait_s else self.patience_s(_PREPARED_WITHIN_S),
        )

    def _preparation(self, host: ConnectedHost, spec: JobSpec) -> protocol.Prepare:
        # A lost host keeps its device lease until it notices the loss.
        least_wait_s = _PREPARED_AGAIN_WITHIN_S if self._is_prepared else 0.0
        host_ranks = spec.hosts[host.place].ranks if spec.hosts else None
        return protocol.Prepare(
            run_id=self.run_folder.id,
            # Below the token of this part: cleanup of the ranks must not kill other processes there.
            token=f"{host.part}.ranks",
            command=self.command if spec is self.spec else spec.command,
            module=spec.module,
            program=spec.program,
            folder=spec.folder,
            device=spec.device,
            ranks=host_ranks or spec.ranks,
            gpu_ids=spec.gpu_ids,
            share=spec.share,
            wait_s=max(spec.wait_s, least_wait_s),
            environment=environment_of(spec),
            alone=not self.is_many,
            lost_after_s=spec.limits.lost_after_s if self.is_many else None,
            typed=spec.typed,
            run=str(self.run_folder.path.resolve()),
        )

    async def leave(self, exit_code: int, text: str) -> None:
        """Release every host; ``text`` is printed on the terminal of a node agent that joined."""
        async with self.waiting.reporting(lambda: "waiting for the node agents to exit"):
            await self.hosts.leave(exit_code, text)

    # ---- waiting

    async def on_each(
        self, hosts: Sequence[ConnectedHost], work: Callable[[ConnectedHost], Awaitable[None]]
    ) -> None:
        """Run ``work`` on all hosts concurrently; raise the first error."""

        async def named(host: ConnectedHost) -> None:
            try:
                await work(host)
            except MusterError as error:
                if self.is_many and not error.what.startswith(host.name):
                    error.what = f"{host.name}: {error.what}"
                raise

        tasks = [asyncio.ensure_future(named(host)) for host in hosts]
        try:
            await self.waiting.unless_stopped(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
