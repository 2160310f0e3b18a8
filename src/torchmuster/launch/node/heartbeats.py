"""The heartbeats of a host's ranks: each rank's own record, and process information from the system."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import psutil

from torchmuster import untrusted
from torchmuster.launch.hangs.heartbeat import Heartbeat

GONE = "X"
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_ZOMBIE: "Z",
}
# After this long without progress, child processes may do the rank's work: compilers, data loaders.
_STILL_S = 3.0
_decode = msgspec.json.Decoder(Heartbeat).decode
_MOST_HEARTBEAT_BYTES = 64 * 1024
_BYTES_AT_A_TIME = 256 * 1024


class Stat:
    """One process: state, parent, CPU time including reaped children, resident memory."""

    __slots__ = ("cpu_s", "memory_bytes", "parent", "state")

    def __init__(self, state: str, parent: int, cpu_s: float, memory_bytes: int) -> None:
        self.state = state
        self.parent = parent
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes


def look_at_process(pid: int) -> Stat | None:
    """Return the stat of a process; None if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        cpu_s = sum(map(int, fields[11:15])) / _TICKS
        return Stat(fields[0], int(fields[1]), cpu_s, int(fields[21]) * _PAGE_BYTES)
    except (OSError, ValueError, IndexError):
        return None if _PROC.is_dir() else _stat_by_psutil(pid)


def _stat_by_psutil(pid: int) -> Stat | None:
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        state = _LETTERS.get(process.status(), "")
        memory_bytes = process.memory_info().rss
        return Stat(state, process.ppid(), times.user + times.system, memory_bytes)
    except (psutil.Error, OSError):
        return None


def children_stats(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of the running descendants of each process."""
    stats = {pid: stat for pid in psutil.pids() if (stat := look_at_process(pid)) is not None}
    below = dict.fromkeys(pids, 0.0)
    for pid, stat in stats.items():
        above: int | None = stat.parent
        while above and pid not in below:
            if above in below:
                below[above] += stat.cpu_s
                break
            above = stats[above].parent if above in stats else None
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
