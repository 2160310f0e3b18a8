"""All samples that one host exports: host, accelerators, local ranks, and its runs.

The runs folder may be on a shared disk. Then each host's exporter exports only what that host
wrote, so that each series is exported once.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Device, Node
from torchmuster.devices.tickets import read_tickets
from torchmuster.launch.history import node_records, run_state
from torchmuster.launch.history.node_records import NodeRanks
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting.run_metrics import RunMetrics
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.runfolder import RunFolder, list_runs, run_name

# A run that has ended is exported for this long, so that its final phase is scraped.
_ENDED_S = 900.0
_MOST_RUNS = 20
# Ranks have a few series each; this is the hard limit per host.
MOST_SERIES = 50_000
# Requests within this time get the same response, so that frequent requests cost nothing.
_FRESH_S = 1.0
# How long a request waits for an earlier one.
_WAIT_S = 5.0
_OF_A_HEARTBEAT = {
    "step": catalogue.RANK_STEP,
    "silent_s": catalogue.RANK_SILENT,
    "memory_bytes": catalogue.RANK_MEMORY,
    "data_share": catalogue.RANK_DATA,
    "communication_share": catalogue.RANK_WAITING,
}


class ActiveRuns:
    """The runs of a folder that are exported, each with the readers of its folder."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._followed: dict[str, RunMetrics] = {}
        self._over: dict[str, int] = {}  # ended runs, and when their end was written

    def now(self, now_unix_s: float) -> Iterator[RunMetrics]:
        """Yield the runs, newest first."""
        followed: dict[str, RunMetrics] = {}
        for run in list_runs(self._runs):
            if len(followed) == _MOST_RUNS:
                break
            if not self._is_over(run, now_unix_s):
                metrics = self._followed.get(run.id) or RunMetrics(run, run_name(run))
                followed[run.id] = metrics
                yield metrics
        self._followed = followed

    def _is_over(self, run: RunFolder, now_unix_s: float) -> bool:
        """Return whether a run is no longer exported; each ended run is read once."""
        try:
            written = run.events.stat().st_mtime_ns
        except OSError:
            return True  # it has no events yet
        if self._over.get(run.id) == written:
            return True
        state = run_state.read_state(run)
        if state is None or (not state.active and now_unix_s - state.since_unix_s >= _ENDED_S):
            self._over[run.id] = written
            return True
        return False


def device_samples(node: Node) -> Iterator[Sample]:
    """Yield the samples of each device; unreadable values are left out."""
    for device in node.accelerators:
        labels = (node.hostname, device.uuid)
        for metric, value in _values(device):
            if value is not None:
                yield Sample(metric, labels, float(value))
        for kind, count in _memory_errors(device):
            if count is not None:
                yield Sample(catalogue.GPU_ECC, (*labels, kind), float(count))
        for reason in device.throttled_by:
            yield Sample(catalogue.GPU_THROTTLED, (*labels, reason), 1.0)


def queue_samples(node: Node) -> Iterator[Sample]:
    """Yield how many requests wait for the GPUs of this host, and how many GPUs are claimed."""
    if not node.accelerators:
        return
    claims = Claims.here(os.environ)
    claimed = claims.read(device.uuid for device in node.accelerators).claimed
    labels = (node.hostname,)
    yield Sample(catalogue.QUEUE_REQUESTS, labels, float(len(read_tickets(claims.queue))))
    yield Sample(catalogue.GPUS_CLAIMED, labels, float(len(claimed)))


def _values(device: Device) -> Iterator[tuple[Metric, float | None]]:
    percent = device.utilization_percent
    yield catalogue.GPU_UTILIZATION, None if percent is None else percent / 100
    yield catalogue.GPU_MEMORY_USED, device.used_bytes
    yield catalogue.GPU_MEMORY_USABLE, device.usable_bytes
    yield catalogue.GPU_TEMPERATURE, device.temperature_c
    yield catalogue.GPU_SLOWDOWN_TEMPERATURE, device.slowdown_temperature_c
    yield catalogue.GPU_POWER, device.power_w
    yield catalogue.GPU_ENERGY, device.energy_j


def _memory_errors(device: Device) -> Iterator[tuple[str, int | None]]:
    if device.ecc is not None and device.ecc.enabled:
        yield "corrected", device.ecc.corrected
        yield "uncorrected", device.ecc.uncorrected


class HostMetrics:
    """Polls the host; CPU utilization covers the time since the last poll."""

    def __init__(self, host: str, runs: Path) -> None:
        self._host = host
        self._runs = runs
        psutil.cpu_percent()  # the first call has no reference

    def samples(self) -> Iterator[Sample]:
        """Yield the values that could be read."""
        memory = psutil.virtual_memory()
        yield self._sample(catalogue.HOST_CPU, psutil.cpu_percent() / 100)
        yield self._sample(catalogue.HOST_MEMORY_AVAILABLE, memory.available)
        yield self._sample(catalogue.HOST_MEMORY, memory.total)
        with contextlib.suppress(OSError):  # the folder may not exist yet
            yield self._sample(catalogue.HOST_DISK_FREE, psutil.disk_usage(str(self._runs)).free)
        received, sent = 0, 0
        for name, count in psutil.net_io_counters(pernic=True).items():
            if not name.startswith("lo"):
                received += count.bytes_recv
                sent += count.bytes_sent
        yield self._sample(catalogue.HOST_NETWORK, received, "received")
        yield self._sample(catalogue.HOST_NETWORK, sent, "sent")

    def _sample(self, metric: Metric, value: float, *labels: str) -> Sample:
        return Sample(metric, (self._host, *labels), float(value))


def rank_number(nodes: Sequence[NodeRanks], labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the number of ranks of a run on all hosts; nothing before the first heartbeat."""
    if nodes:
        yield Sample(catalogue.RUN_RANKS, labels, float(sum(len(node.ranks) for node in nodes)))


def rank_samples(nodes: Sequence[NodeRanks], labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the samples of each rank; ``labels`` are the labels of its run."""
    for node in nodes:
        for heartbeat in node.ranks:
            own = (*labels, node.host, str(heartbeat.rank))
            for field, metric in _OF_A_HEARTBEAT.items():
                if (value := getattr(heartbeat, field)) is not None:
                    yield Sample(metric, own, float(value))


class Collector:
    """Collects samples on request; thread-safe."""

    def __init__(
        self,
        runs: Path,
        take_snapshot: Callable[[], Node],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Collect from the runs in a folder; ``take_snapshot`` polls this host's devices."""
        self._runs = runs
        self._take_snapshot = take_snapshot
        self._clock = clock
        self._active = ActiveRuns(runs)
        self._host: HostMetrics | None = None
        self._turn = threading.Lock()
        self._answer: tuple[float, list[Sample]] | None = None

    def samples(self) -> list[Sample]:
        """Return all current samples.

        Raises :class:`TimeoutError` while an earlier request is stuck in a driver that does not
        respond: one thread waits for the driver, however many requests come.
        """
        if not self._turn.acquire(timeout=_WAIT_S):
            raise TimeoutError("the driver of a device does not respond")
        try:
            now_unix_s = self._clock()
            if self._answer is None or not 0 <= now_unix_s - self._answer[0] < _FRESH_S:
                self._answer = (now_unix_s, self._collect(now_unix_s))
            return self._answer[1]
        finally:
            self._turn.release()

    def _collect(self, now_unix_s: float) -> list[Sample]:
        node = self._take_snapshot()
        self._host = self._host or HostMetrics(node.hostname, self._runs)
        samples = [*self._host.samples(), *device_samples(node), *queue_samples(node)]
        for run in self._active.now(now_unix_s):
            with contextlib.suppress(Exception):  # a damaged run must not hide the others
                samples += list(self._of_run(run, node.hostname, now_unix_s))
        return samples[:MOST_SERIES]

    def _of_run(self, run: RunMetrics, hostname: str, now_unix_s: float) -> Iterator[Sample]:
        if _exports_run(hostname, run.folder):
            yield from run.samples(now_unix_s)
            nodes = node_records.read_node_ranks(run.folder, now_unix_s)
            yield from rank_number(nodes, run.labels)
        nodes = node_records.read_node_ranks(run.folder, now_unix_s, of_host=hostname)
        yield from rank_samples(nodes, run.labels)


def _exports_run(machine: str, run: RunFolder) -> bool:
    """Return whether this host exports the run-level metrics: it runs rank 0, or launched the run.

    Two hosts may do so: if one is down, the other still exports how the run ends.
    """
    job = run_state.read_job(run)
    if job is None or job.launcher.host == machine:
        return True
    return node_records.node_record_path(run, machine, 0).exists()
