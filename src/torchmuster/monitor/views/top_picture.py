"""The current state of a host and its ranks, as ``muster top`` shows it, independent of layout."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.devices.model import Device, DeviceProcess, Node
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records, run_state
from torchmuster.monitor import catalogue
from torchmuster.monitor.alerts.watching import AlertNews, AlertWatch
from torchmuster.monitor.collecting import collector
from torchmuster.monitor.collecting.collector import (
    ActiveRuns,
    FollowedRun,
    HostMetrics,
    follow_runs,
)
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.monitor.views import key_figures
from torchmuster.runfolder import RunFolder

_LOOKS_REMEMBERED = 60


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank: its heartbeat, and the devices that its process uses."""

    job: str
    run: str
    host: str
    heartbeat: Heartbeat
    devices: Sequence[Device] = ()
    holds_up: bool = False  # the other ranks of its run wait for it

    @property
    def gpu(self) -> str:
        """The numbers of its devices; "" if unknown."""
        return ",".join(one.number for one in self.devices)

    @property
    def device_bytes(self) -> int | None:
        """Memory that it uses on its devices."""
        held = [
            process.memory_bytes
            for device in self.devices
            for process in device.processes
            if process.pid == self.heartbeat.pid and process.memory_bytes is not None
        ]
        return sum(held) if held else None

    @property
    def device_busy(self) -> float | None:
        """The utilization of its devices."""
        known = [one.utilization_percent for one in self.devices]
        numbers = [one for one in known if one is not None]
        return sum(numbers) / len(numbers) / 100 if numbers else None


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One accelerator, the ranks on it, and its recent utilization."""

    host: str
    device: Device
    ranks: Sequence[tuple[str, int]] = ()  # job and rank
    others: Sequence[DeviceProcess] = ()  # other processes that use it
    busy_percents: Sequence[int] = ()  # newest last


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """The local host."""

    name: str
    values: Mapping[Metric, float]  # metrics with one value per host
    received_bytes_s: float | None = None
    sent_bytes_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """A run in a line."""

    id: str
    job: str
    phase: str
    values: Mapping[Metric, float]


@dataclass(frozen=True, kw_only=True)
class TopPicture:
    """Everything at one moment."""

    at_unix_s: float
    host: HostFigures
    node: Node
    devices: Sequence[DeviceRow] = ()
    ranks: Sequence[RankRow] = ()
    runs: Sequence[RunFigures] = ()
    alerts: Sequence[AlertNews] = ()
    hosts: Sequence[str] = ()  # of devices and ranks


class TopWatch:
    """Polls this host and the runs in a folder, or one run."""

    def __init__(
        self, runs: Path, look: Callable[[], Node], *, only: RunFolder | None = None
    ) -> None:
        """Watch all active runs of a folder; with ``only``, that run."""
        self._runs = runs
        self._look = look
        self._active = ActiveRuns(runs)
        self._only = None if only is None else follow_runs(only)
        self._host: HostMetrics | None = None
        self._traffic: tuple[float, Mapping[str, float]] | None = None
        self._busy: dict[str, deque[int]] = {}
        self._watching = AlertWatch()

    def look(self, now_unix_s: float) -> TopPicture:
        """Return the current picture."""
        node = self._look()
        self._host = self._host or HostMetrics(node.hostname, self._runs)
        samples = [*self._host.samples(), *collector.device_samples(node)]
        samples += collector.queue_samples(node)
        host = self._host_figures(node.hostname, samples, now_unix_s)
        figures: list[RunFigures] = []
        heartbeats: list[tuple[FollowedRun, str, Sequence[Heartbeat]]] = []
        elsewhere: dict[str, tuple[Device, ...]] = {}
        for run in self._chosen(now_unix_s):
            try:
                of_run = [*run.metrics.samples(now_unix_s)]
                machines = node_records.read_node_ranks(run.folder, now_unix_s)
                of_run += collector.rank_samples(machines, (run.job, run.folder.id))
                figures.append(_figures(run, of_run))
            except Exception:  # a damaged run must not hide the others
                if self._only is not None:
                    raise
                continue
            samples += of_run
            for machine in machines:
                heartbeats.append((run, machine.host, machine.ranks))
            for other in node_records.read_node_devices(run.folder, now_unix_s):
                if not _same(other.host, node.hostname):
                    elsewhere[other.host] = other.devices
        self._watching.look(samples, now_unix_s)
        devices = [(node.hostname, one) for one in node.accelerators]
        devices += [(name, one) for name, several in sorted(elsewhere.items()) for one in several]
        ranks = _rank_rows(heartbeats, devices)
        rows = self._device_rows(devices, ranks)
        return TopPicture(
            at_unix_s=now_unix_s,
            host=host,
            node=node,
            devices=rows,
            ranks=ranks,
            runs=figures,
            alerts=self._watching.raised,
            hosts=sorted({one.host for one in rows} | {one.host for one in ranks}),
        )

    def _chosen(self, now_unix_s: float) -> Iterable[FollowedRun]:
        return self._active.now(now_unix_s) if self._only is None else [self._only]

    def _host_figures(self, name: str, samples: Sequence[Sample], now_unix_s: float) -> HostFigures:
        of_host = [one for one in samples if one.labels[0] == name]
        values = {one.metric: one.value for one in of_host if len(one.labels) == 1}
        counted = {
            one.labels[1]: one.value for one in of_host if one.metric is catalogue.HOST_NETWORK
        }
        rates: dict[str, float] = {}
        if self._traffic is not None and now_unix_s > self._traffic[0]:
            before_s, before = self._traffic
            rates = {
                way: max(0.0, counted[way] - before.get(way, 0.0)) / (now_unix_s - before_s)
                for way in counted
            }
        self._traffic = (now_unix_s, counted)
        return HostFigures(
            name=name,
            values=values,
            received_bytes_s=rates.get("received"),
            sent_bytes_s=rates.get("sent"),
        )

    def _device_rows(
        self, devices: Sequence[tuple[str, Device]], ranks: Sequence[RankRow]
    ) -> list[DeviceRow]:
        here = {device.uuid for _, device in devices}
        for gone in self._busy.keys() - here:
            del self._busy[gone]
        rows = []
        for host, device in devices:
            seen = self._busy.setdefault(device.uuid, deque(maxlen=_LOOKS_REMEMBERED))
            seen.append(device.utilization_percent or 0)
            on_it = [one for one in ranks if device in one.devices]
            known = {one.heartbeat.pid for one in on_it}
            others = [one for one in device.compute_processes if one.pid not in known]
            rows.append(
                DeviceRow(
                    host=host,
                    device=device,
                    ranks=[(one.job, one.heartbeat.rank) for one in on_it],
                    others=others,
                    busy_percents=tuple(seen),
                )
            )
        return rows


def _figures(run: FollowedRun, samples: Sequence[Sample]) -> RunFigures:
    state = run_state.read_state(run.folder)
    return RunFigures(
        id=run.folder.id,
        job=run.job,
        phase=state.phase if state else "submitted",
        values={
            one.metric: one.value
            for one in samples
            if not one.metric.labels and len(one.labels) == 2
        },
    )


def _rank_rows(
    heartbeats: Sequence[tuple[FollowedRun, str, Sequence[Heartbeat]]],
    devices: Sequence[tuple[str, Device]],
) -> list[RankRow]:
    held_up_by = _held_up_by(heartbeats)
    rows = []
    for run, host, of_host in heartbeats:
        on_host = [device for name, device in devices if _same(name, host)]
        for heartbeat in of_host:
            rows.append(
                RankRow(
                    job=run.job,
                    run=run.folder.id,
                    host=host,
                    heartbeat=heartbeat,
                    devices=[one for one in on_host if _is_on(heartbeat, one)],
                    holds_up=held_up_by.get(run.folder.id) == heartbeat.rank,
                )
            )
    return sorted(rows, key=lambda one: (one.run, one.heartbeat.rank))


def _held_up_by(
    heartbeats: Sequence[tuple[FollowedRun, str, Sequence[Heartbeat]]],
) -> dict[str, int | None]:
    by_run: dict[str, list[Heartbeat]] = {}
    for run, _, of_host in heartbeats:
        by_run.setdefault(run.folder.id, []).extend(of_host)
    return {run: key_figures.held_up_by(several) for run, several in by_run.items()}


def _is_on(heartbeat: Heartbeat, device: Device) -> bool:
    return any(process.pid == heartbeat.pid for process in device.processes)


def _same(a: str, b: str) -> bool:
    """Return whether two names mean the same host, with or without domain."""
    return a.partition(".")[0] == b.partition(".")[0]


# Sort keys of the ranks: descending, except for the rank itself.
ORDERS: Mapping[str, Callable[[RankRow], float | None]] = {
    "rank": lambda one: -one.heartbeat.rank,
    "step": lambda one: one.heartbeat.step,
    "silent": lambda one: one.heartbeat.silent_s,
    "data": lambda one: one.heartbeat.data_share,
    "others": lambda one: one.heartbeat.communication_share,
    "cpus": lambda one: one.heartbeat.busy,
    "memory": lambda one: one.heartbeat.memory_bytes,
    "busy": lambda one: one.device_busy,
}


def ordered_rows(ranks: Sequence[RankRow], order: str, *, reverse: bool = False) -> list[RankRow]:
    """Return the ranks sorted; ranks with an unknown value come last."""
    key = ORDERS[order]
    known = [(value, one) for one in ranks if (value := key(one)) is not None]
    unknown = [one for one in ranks if key(one) is None]
    # Ties stay in rank order.
    known.sort(key=lambda pair: pair[0] if reverse else -pair[0])
    return [one for _, one in known] + unknown
