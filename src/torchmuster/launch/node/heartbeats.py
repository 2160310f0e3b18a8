"""The heartbeats of a host's ranks: each rank's own record, and process information from the system."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from torchmuster import untrusted
from torchmuster.launch.heartbeat import Heartbeat

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


def read_process(pid: int) -> Stat | None:
    """Return the stat of a process; None if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state = _LETTERS.get(process.status(), "")
            return Stat(state, process.ppid(), _cpu_s(process), process.memory_info().rss)
    except (psutil.Error, OSError):
        return None


def cpu_s_with_children(pid: int) -> float:
    """Return the CPU time of a process and of its running descendants; 0 for one that is gone."""
    used_s = 0.0
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        used_s += _cpu_s(process)
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                used_s += _cpu_s(child)
    return used_s


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:_CPU_TIMES]))


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
        self._cpu: dict[int, tuple[float, float]] = {}  # by process: when, and its CPU time

    def read(self) -> tuple[Heartbeat, ...]:
        """Return the newest heartbeat of every rank that has one."""
        heartbeats = []
        for path in self._paths:
            heartbeat = _read_heartbeat(path)
            if heartbeat is not None:
                heartbeats.append(self._with_process(heartbeat))
        return tuple(heartbeats)

    def _with_process(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return a heartbeat with what the system knows of the process."""
        pid = heartbeat.pid
        stat = read_process(pid)
        is_still = self._unchanged_s(self._moves, pid, heartbeat.moves) >= _STILL_S
        busy = None
        if is_still and stat is not None:
            busy = self._processors_used(pid)
        else:
            self._cpu.pop(pid, None)
        return msgspec.structs.replace(
            heartbeat,
            state=GONE if stat is None else stat.state,
            busy=busy,
            memory_bytes=None if stat is None else stat.memory_bytes,
            silent_s=round(self._unchanged_s(self._beats, pid, heartbeat.beat), 1),
        )

    def _processors_used(self, pid: int) -> float | None:
        """Return how many CPUs a process and its children have used since the last call; None for the first one.

        To find the children means reading every process of the host, so this is asked only of ranks that stand still.
        """
        now, used_s = self._clock(), cpu_s_with_children(pid)
        before = self._cpu.get(pid)
        self._cpu[pid] = (now, used_s)
        if before is None:
            return None
        then, before_s = before
        # The CPU time of a child that exited since then is lost, or added to its parent.
        return round(max(0.0, used_s - before_s) / max(now - then, 0.001), 3)

    def _unchanged_s(self, known: dict[int, tuple[int, float]], pid: int, count: int) -> float:
        """Return how long a process has reported the same number."""
        now = self._clock()
        before, since_s = known.get(pid, (None, now))
        if before != count:
            known[pid] = (count, now)
            return 0.0
        return now - since_s


def _read_heartbeat(path: Path) -> Heartbeat | None:
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
