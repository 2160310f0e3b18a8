"""The launcher's hang monitor: reports which rank the others wait for, and keeps stack dumps of the ranks."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.hangs.observation import Hang
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history import evidence, node_records, run_state
from torchmuster.launch.launcher.console import show_findings
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder

logger = logging.getLogger(__name__)

# If many ranks wait for one, the stacks of some of them are enough.
_RANKS_EXAMINED = 64
_EXAMINED_WITHIN_S = 10.0
# A hang that cannot resolve itself is stopped, so that the run can restart. Not at once: the user may want to
# inspect the processes.
_HOPELESS_AFTER_S = 60.0
_RECORDS_PER_S = 200
# Steps without any collective that show that ranks train beside each other; with a process group they have more time for it.
_STEPS_WITHOUT_GROUP, _STEPS_WITH_GROUP = 10, 50
_FIX_UNCONNECTED = (
    "call torch.distributed.init_process_group() and wrap the model (DistributedDataParallel); "
    "on CPUs Hugging Face's Trainer and Accelerate need use_cpu=True or cpu=True. "
    "Ignore this if the ranks are meant to be independent"
)


@dataclass(kw_only=True)
class _StackDump:
    """A stack dump in progress: its folder, and the hosts that have not answered yet."""

    folder: Path
    missing: set[int]
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class HangMonitor:
    """Watches the ranks of one attempt."""

    def __init__(
        self,
        hosts: Sequence[ConnectedHost],
        run: RunFolder,
        *,
        later: Callable[[Awaitable[None]], None],
        end_after_s: float | None = None,
    ) -> None:
        """Start watching; ``later`` schedules a background task.

        With ``end_after_s`` every hang must be stopped after that time.
        """
        self._hosts = hosts
        self._run = run
        self._later = later
        self._end_after_s = end_after_s
        self._watch = HangWatch()
        self._unconnected = UnconnectedRanks()
        self._devices = devices_of(hosts)
        self.finding: Finding | None = None  # of the current hang
        self._examined: set[object] = set()
        self._examination: _StackDump | None = None
        self._failed = False
        self._written_s: dict[int, float] = {}

    @property
    def must_end(self) -> bool:
        """Whether the hang has lasted so long that the run must be stopped."""
        hang = self._watch.hang
        if hang is None or self.finding is None:
            return False
        if self._end_after_s is not None:
            return hang.waited_s >= self._end_after_s
        return hang.is_hopeless and hang.waited_s >= _HOPELESS_AFTER_S

    def look(self) -> None:
        """Report what is new; called about every second."""
        with self._without_stopping_the_run():
            finding = self._watch.news(self._devices)
            if finding is None:
                return
            hang = self._watch.hang
            if hang is None:  # if it recurs, it is another hang
                self.finding = None
                self._examined.clear()
                run_state.log_event(self._run, run_state.HANG_OVER, what=finding.what)
                show_findings([finding])
                return
            self.finding = finding
            if hang.key in self._examined:
                show_findings([dataclasses.replace(finding, why="", fix="", evidence="")])
                return
            self._examined.add(hang.key)
            folder = self._new_folder()
            evidence.log_hang(self._run, finding, folder)
            show_findings([finding])
            if folder is not None:
                self._later(self._examine(hang, finding, folder))

    def hear(self, host: ConnectedHost, sign: protocol.FromAgent) -> None:
        """Take heartbeats and stack dumps of the ranks."""
        with self._without_stopping_the_run():
            match sign:
                case protocol.Heartbeats():
                    self._watch.hear(host.name, sign.heartbeats)
                    self._warn_of_unconnected_ranks(sign)
                    if sign.heartbeats and self._is_due(host):
                        self._later(self._write_down(host, sign))
                case protocol.Output() if self._examination is not None:
                    self._keep(self._examination, sign)
                case protocol.Done() if self._examination is not None:
                    self._examination.missing.discard(host.place)
                    if not self._examination.missing:
                        self._examination.answered.set()

    def _warn_of_unconnected_ranks(self, sign: protocol.Heartbeats) -> None:
        finding = self._unconnected.hear(sign.heartbeats)
        if finding is not None:
            run_state.log_event(self._run, finding.name, what=finding.what)
            show_findings([finding])

    def _is_due(self, host: ConnectedHost) -> bool:
        """Return whether to write a host's record now: with many hosts, not each time."""
        now = time.monotonic()
        due = now - self._written_s.get(host.place, -math.inf) >= len(self._hosts) / _RECORDS_PER_S
        if due:
            self._written_s[host.place] = now
        return due

    async def _write_down(self, host: ConnectedHost, sign: protocol.Heartbeats) -> None:
        """Record the heartbeats of a host's ranks, for monitoring."""
        assert host.record is not None
        sees_run = host.prepared is not None and host.prepared.sees_run
        await asyncio.to_thread(
            node_records.write_node_ranks,
            self._run,
            host=host.record.host,
            exporter=host.record.host if sees_run else socket.gethostname(),
            attempt=sign.attempt,
            heartbeats=sign.heartbeats,
        )

    @contextlib.contextmanager
    def _without_stopping_the_run(self) -> Iterator[None]:
        """Continue without a hang monitor if it fails: it must not stop the run that it watches."""
        try:
            yield
        except Exception as error:
            self.finding = None
            self._watch = HangWatch()
            if not self._failed:
                self._failed = True
                logger.info(f"the hang monitor failed, so hangs are no longer reported: {error!r}")

    def _new_folder(self) -> Path | None:
        try:
            return evidence.new_hang(self._run)
        except OSError as error:
            logger.info(f"cannot store the ranks' stack dumps: {error}")
            return None

    async def _examine(self, hang: Hang, finding: Finding, folder: Path) -> None:
        """Request stack dumps from the ranks, and store them in a folder."""
        concerned = [rank.rank for rank in (*hang.culprits, *hang.waiting)]
        world_size = sum(host.prepared.ranks for host in self._hosts if host.prepared)
        chosen = tuple(dict.fromkeys([*concerned, *range(world_size)]))[:_RANKS_EXAMINED]
        here = {host.place for host in self._hosts if not host.is_lost and not host.ended}
        self._examination = _StackDump(folder=folder, missing=here)
        for host in self._hosts:
            if host.place in here:
                self._later(host.channel.send(protocol.DumpStacks(ranks=chosen)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._examination.answered.wait(), _EXAMINED_WITHIN_S)
        record = evidence.HangRecord(finding=finding, folder=folder)
        if record.files:
            logger.info(f"stacks and collectives of the ranks are in {folder}")
        if not hang.has_culprit:  # else it only repeats the finding
            analysis = await asyncio.to_thread(record.analyse)
            show_findings([other for other in analysis if other.name != finding.name])

    def _keep(self, examination: _StackDump, sign: protocol.Output) -> None:
        # The name comes from another host: only known names become files.
        endings = {"stacks.txt": evidence.STACKS, "flight.json": evidence.FLIGHT}
        ending = endings.get(sign.file)
        if ending is None:
            return
        text = redact_text(sign.text) if ending == evidence.STACKS else sign.text
        path = examination.folder / f"rank-{sign.rank}{ending}"
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            path.write_text(text, encoding="utf-8")


def devices_of(hosts: Sequence[ConnectedHost]) -> dict[int, str]:
    """Return the device of each rank that has its own."""
    devices: dict[int, str] = {}
    first = 0
    for host in hosts:
        prepared = host.prepared
        if prepared is None:
            continue
        if host.has_gpus and len(prepared.devices) == prepared.ranks:
            devices.update(enumerate(prepared.devices, start=first))
        first += prepared.ranks
    return devices


class UnconnectedRanks:
    """Receives the heartbeats of one attempt, and reports once that its ranks make steps, but call no collective.

    A script that initializes torch.distributed only under some condition, or does not wrap its model, trains one unrelated
    model per rank. Scripts that communicate rarely are not meant: one collective since the start is enough.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # of the ranks with enough steps
        self._is_decided = False

    def hear(self, heartbeats: Iterable[Heartbeat]) -> Finding | None:
        """Take in heartbeats; return the finding as soon as two ranks have made enough steps by themselves."""
        if self._is_decided:
            return None
        for heartbeat in heartbeats:
            if heartbeat.collectives or any(heartbeat.begun.values()):
                self._is_decided = True
                return None
            if heartbeat.groups and heartbeat.collectives is None:
                continue  # not visible
            needed = _STEPS_WITH_GROUP if heartbeat.groups else _STEPS_WITHOUT_GROUP
            if heartbeat.step is not None and heartbeat.step >= needed:
                self._steps[heartbeat.rank] = heartbeat.step
        if len(self._steps) < 2:
            return None
        self._is_decided = True
        return Finding(
            name="ranks-not-connected",
            status=Status.WARNING,
            what=f"{len(self._steps)} ranks have each made {min(self._steps.values())} steps without any collective",
            why="gradients are not exchanged: each rank trains a model of its own",
            fix=_FIX_UNCONNECTED,
        )
