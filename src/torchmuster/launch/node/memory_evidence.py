"""Memory evidence for processes that were killed without a message.

The kernel kills with SIGKILL, which leaves no message in the process. It counts such kills in the control
group (cgroup) of the process. The memory use of a process is lost when it exits, so it must be sampled before.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchmuster.devices.readers import sysfs
from torchmuster.devices.readers.cpu import PROC, SYS, cgroup_folders
from torchmuster.units import KiB, format_bytes

KERNEL_KILLED_IT = "the kernel killed it: out of memory"

_KILLED = (-9, 137)  # as Python and as shells report SIGKILL
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


class MemoryPeaks:
    """Peak memory of processes; call ``sample`` regularly while they run."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._proc_root = proc_root
        self._peaks: dict[int, int] = {}

    def sample(self, pids: Iterable[int]) -> None:
        """Sample these processes now; those that have exited keep their peak."""
        for pid in pids:
            self._peaks[pid] = max(self._peak(pid), self._peaks.get(pid, 0))

    def of(self, pid: int) -> int | None:
        """Return the peak memory of a process; None if it was never sampled."""
        return self._peaks.get(pid) or None

    def _peak(self, pid: int) -> int:
        """Return the peak memory so far; 0 for a process that has exited, and off Linux."""
        try:
            # Far cheaper than psutil, and it has the true peak, not only the sampled one.
            status = (self._proc_root / str(pid) / "status").read_bytes()
        except OSError:
            return 0
        peak = _PEAK.search(status)  # a zombie has none
        return int(peak[1]) * KiB if peak else 0


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """The count of out-of-memory kills before the start, to separate later ones from earlier ones.

    ``kills`` is that of the cgroup, None if it cannot be read.
    """

    proc_root: Path
    sys_root: Path
    kills: int | None

    @classmethod
    def begin(cls, proc_root: Path = PROC, sys_root: Path = SYS) -> "MemoryWatch":
        """Record the current count."""
        return cls(proc_root=proc_root, sys_root=sys_root, kills=_kills(proc_root, sys_root))

    def explain(self, pid: int, exit_code: int, peaks: MemoryPeaks) -> str:
        """Return the memory evidence for a process that failed; "" if there is none.

        A text that begins with ``KERNEL_KILLED_IT`` is certain.
        """
        now = _kills(self.proc_root, self.sys_root)
        more = 0 if self.kills is None or now is None else now - self.kills
        if exit_code not in _KILLED:
            return _other_kills(more) if exit_code > 0 else ""
        peak = peaks.of(pid)
        used = f"its peak was {format_bytes(peak)}" if peak else ""
        if more <= 0:
            not_killed = "not killed by the kernel's out-of-memory killer"
            return "; ".join(filter(None, ["" if self.kills is None else not_killed, used]))
        if not peak:
            return f"{KERNEL_KILLED_IT}; the limit is {self._room()}"
        return f"{KERNEL_KILLED_IT}; {used} of {self._room()}"

    def _room(self) -> str:
        """Return the available memory as text."""
        machine = int(psutil.virtual_memory().total)
        tightest = machine
        for folder in cgroup_folders("memory", self.proc_root, self.sys_root):
            for file in ("memory.max", "memory.limit_in_bytes"):
                limit = sysfs.read_integer(folder / file)
                tightest = min(tightest, limit if limit is not None else machine)
        if tightest < machine:
            return f"the {format_bytes(tightest)} this cgroup may use"
        return f"the {format_bytes(machine)} this host has"


def _other_kills(kills: int) -> str:
    if kills <= 0:
        return ""
    processes = "a process" if kills == 1 else f"{kills} processes"
    return f"the kernel killed {processes} of this job during the run: out of memory"


def _kills(proc_root: Path, sys_root: Path) -> int | None:
    """Return the kill count of this process's own cgroup; its parents also count kills in other cgroups.

    cgroup v2 counts in memory.events, v1 in memory.oom_control.
    """
    for folder in cgroup_folders("memory", proc_root, sys_root):
        for file in ("memory.events", "memory.oom_control"):
            for line in (sysfs.read_text(folder / file) or "").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.strip().isdecimal():
                    return int(count)
    return None
