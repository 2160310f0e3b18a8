"""The heartbeats of a host's ranks: each rank's own record, and process information from the system."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from torchmuster import untrusted
from torchmuster.launch.hangs.heartbeat import Heartbeat

GONE = "X"
_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: GONE,
}
_CPU_TIMES = 4  # of psutil's: user and system, of the process and of its reaped children
# After this long without progress, child processes may do the rank's work: compilers, data loaders.
_STILL_S = 3.0
_decode = msgspec.json.Decoder(Heartbeat).decode
_MOST_HEARTBEAT_BYTES = 64 * 1024
_BYTES_AT_A_TIME = 256 * 1024


class Stat(NamedTuple):
    """One process: its state, parent, CPU time including reaped children, and resident memory."""

    state: str
    parent: int
    cpu_s: float
    memory_bytes: int


def look_at_process(pid: int) -> Stat | None:
    """Return the stat of a process; None if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state = _LETTERS.get(process.status(), "")
            cpu_s = sum(process.cpu_times()[:_CPU_TIMES])
            return Stat(state, process.ppid(), cpu_s, process.memory_info().rss)
    except (psutil.Error, OSError):
        return None


def children_stats(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of the running descendants of each process."""
    below = dict.fromkeys(pids, 0.0)
    parents: dict[int, int] = {}
    used_s: dict[int, float] = {}
    for process in psutil.process_iter(["ppid", "cpu_times"]):
        parents[process.pid] = process.info["ppid"] or 0
        used_s[process.pid] = sum((process.info["cpu_times"] or ())[:_CPU_TIMES])
    for pid in used_s.keys() - below.keys():
        above = parents[pid]
        while above and above not in below:
            above = parents.get(above, 0)
        if above:
            below[above] += used_s[pid]
    return below


class Load:
    """How many CPUs the ranks and their children use, between two samples.

    Finding all children means reading every process of the host, so this is done only for the given
    ranks: those that make no progress.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[int, tuple[float, float, float | None]] = {}

    def take(
        self, stats: Mapping[int, Stat | None], *, with_children: Iterable[int]
    ) -> dict[int, float]:
        """Return the CPUs used since the last sample, by process; empty for the first sample."""
        pids = [pid for pid in with_children if stats.get(pid) is not None]
        below = children_stats(pids) if pids else {}
        now, busy = self._clock(), {}
        for pid, stat in stats.items():
            if stat is None:
                continue
            children_s = below.get(pid)
            if pid in self._before:
                then, own_s, then_children_s = self._before[pid]
                used_s = stat.cpu_s - own_s
                if children_s is not None and then_children_s is not None:
                    used_s += children_s - then_children_s
                # The CPU time of a child that exited since then is lost, or added to its parent.
                busy[pid] = round(max(0.0, used_s) / max(now - then, 0.001), 3)
            self._before[pid] = (now, stat.cpu_s, children_s)
        return busy


class HeartbeatReader:
    """Reads the heartbeats of one attempt."""

    def __init__(
        self,
        records: Path,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [records / f"rank-{rank}.heartbeat.json" for rank in ranks]
        self._clock = clock
        self._beats: dict[int, tuple[int, float]] = {}  # by process: the last value, and since when
        self._moves: dict[int, tuple[int, float]] = {}
        self._load = Load(clock)

    def read(self) -> tuple[Heartbeat, ...]:
        """Return the newest heartbeat of every rank that has one."""
        heartbeats = [
            heartbeat for path in self._paths if (heartbeat := _read_one_rank(path)) is not None
        ]
        stats = {heartbeat.pid: look_at_process(heartbeat.pid) for heartbeat in heartbeats}
        still = [
            beat.pid
            for beat in heartbeats
            if self._unchanged_s(self._moves, beat.pid, beat.moves) >= _STILL_S
        ]
        busy = self._load.take(stats, with_children=still)
        return tuple(
            msgspec.structs.replace(
                heartbeat,
                state=GONE if (stat := stats[heartbeat.pid]) is None else stat.state,
                busy=busy.get(heartbeat.pid),
                memory_bytes=None if stat is None else stat.memory_bytes,
                silent_s=round(self._unchanged_s(self._beats, heartbeat.pid, heartbeat.beat), 1),
            )
            for heartbeat in heartbeats
        )

    def _unchanged_s(self, known: dict[int, tuple[int, float]], pid: int, count: int) -> float:
        """Return how long a process has reported the same number."""
        now = self._clock()
        before, since_s = known.get(pid, (None, now))
        if before != count:
            known[pid] = (count, now)
            return 0.0
        return now - since_s


def _read_one_rank(path: Path) -> Heartbeat | None:
    try:
        return untrusted.read_typed(path, _decode, _MOST_HEARTBEAT_BYTES)
    except (OSError, untrusted.Unreadable):  # none yet, or its disk is full
        return None


class MetricsReader:
    """Reads what a rank records of its script (``integrations/recorder.py``)."""

    def __init__(self, records: Path, rank: int) -> None:
        self._path = records / f"rank-{rank}.metrics.jsonl"
        self._offset = 0

    def new_lines(self) -> str:
        """Return some complete new lines; "" if there are none."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(_BYTES_AT_A_TIME)
        except OSError:
            return ""
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data.decode("utf-8", errors="replace")
