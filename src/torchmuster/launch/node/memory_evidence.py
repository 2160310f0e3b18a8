"""Memory evidence for processes that were killed without a message.

The kernel kills with SIGKILL, which leaves no message in the process. It counts such kills in the control
group (cgroup) of the process, and names the process in its log, which not every user can read. The memory use of
a process is lost when it exits, so it must be sampled before.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchmuster.devices.readers import sysfs
from torchmuster.devices.readers.cpu import PROC, SYS, cgroup_folders
from torchmuster.units import KiB, format_bytes

KERNEL_KILLED_IT = "the kernel killed it: out of memory"
KERNEL_LOG = Path("/dev/kmsg")

_RECORD = re.compile(rb"^\d+,(\d+),[^;\n]*;(.*)", re.MULTILINE)
_LONGEST_RECORD = 8192
_KILLED = (-9, 137)  # as Python and as shells report SIGKILL
_VICTIM = re.compile(
    r"(?P<where>Memory cgroup out of memory|Out of memory).*?: Killed process (?P<pid>\d+) "
)
_RESIDENT = re.compile(r"(?:anon|file|shmem)-rss:(\d+)kB")
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)
_NOW = re.compile(rb"^VmRSS:\s*(\d+) kB", re.MULTILINE)


class MemoryPeaks:
    """Peak memory of processes; call ``sample`` regularly while they run."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._proc_root = proc_root
        self._peaks: dict[int, int] = {}
        self.together_bytes = 0  # peak of their sum

    def sample(self, pids: Iterable[int]) -> None:
        """Sample these processes now; those that have exited keep their peak."""
        together = 0
        for pid in pids:
            peak, now = self._peak_and_current(pid)
            self._peaks[pid] = max(peak, self._peaks.get(pid, 0))
            together += now
        self.together_bytes = max(self.together_bytes, together)

    def of(self, pid: int) -> int | None:
        """Return the peak memory of a process; None if it was never sampled."""
        return self._peaks.get(pid) or None

    def _peak_and_current(self, pid: int) -> tuple[int, int]:
        """Return peak and current memory; 0 for a process that has exited."""
        if sys.platform != "linux":
            try:
                resident = int(psutil.Process(pid).memory_info().rss)
            except (psutil.Error, OSError):
                return 0, 0
            return resident, resident
        try:
            # Far cheaper than psutil, and it has the true peak, not only the sampled one.
            status = (self._proc_root / str(pid) / "status").read_bytes()
        except OSError:
            return 0, 0
        peak, now = _PEAK.search(status), _NOW.search(status)  # a zombie has neither
        return (int(peak[1]) * KiB if peak else 0), (int(now[1]) * KiB if now else 0)


@dataclass(frozen=True, kw_only=True)
class _Victim:
    """A process that the kernel reports as killed."""

    pid: int
    of_cgroup: bool
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """The counters before the start, to separate later out-of-memory kills from earlier ones.

    ``kills`` is the cgroup's count of out-of-memory kills, None if it cannot be read.
    """

    proc_root: Path
    sys_root: Path
    kernel_log: Path
    kills: int | None
    last_record: int

    @classmethod
    def begin(
        cls, proc_root: Path = PROC, sys_root: Path = SYS, kernel_log: Path = KERNEL_LOG
    ) -> "MemoryWatch":
        """Record the current counters."""
        return cls(
            proc_root=proc_root,
            sys_root=sys_root,
            kernel_log=kernel_log,
            kills=_kills(proc_root, sys_root),
            last_record=max((number for number, _ in _records(kernel_log)), default=-1),
        )

    def explain(self, pid: int, exit_code: int, peaks: MemoryPeaks | None = None) -> str:
        """Return the memory evidence for a process that failed; "" if there is none.

        A text that begins with ``KERNEL_KILLED_IT`` is certain.
        """
        victims = list(self._victims())
        named = next((victim for victim in victims if victim.pid == pid), None)
        now = _kills(self.proc_root, self.sys_root)
        more = 0 if self.kills is None or now is None else now - self.kills
        if exit_code not in _KILLED:
            return _other_kills(more) if exit_code > 0 else ""
        seen = (peaks.of(pid) if peaks else None) or 0
        peak = max(seen, named.resident_bytes if named else 0) or None
        if named is None and more <= 0:
            parts = (
                [] if self.kills is None else ["not killed by the kernel's out-of-memory killer"]
            )
            return "; ".join([*parts, *([f"its peak was {format_bytes(peak)}"] if peak else [])])
        # In a container the kernel's log has other process ids; which limit was hit is still valid.
        of_cgroup = (
            named.of_cgroup if named else any(killed.of_cgroup for killed in victims) or None
        )
        room = self._room(of_cgroup)
        if peak is None:
            return f"{KERNEL_KILLED_IT}; the limit is {room}"
        together = ""
        if peaks and peaks.together_bytes > 1.1 * peak:
            together = f" ({format_bytes(peaks.together_bytes)} with the other ranks)"
        return f"{KERNEL_KILLED_IT}; its peak was {format_bytes(peak)}{together} of {room}"

    def _victims(self) -> Iterator[_Victim]:
        for number, text in _records(self.kernel_log):
            if number > self.last_record and (found := _VICTIM.search(text)):
                yield _Victim(
                    pid=int(found["pid"]),
                    of_cgroup=found["where"].startswith("Memory cgroup"),
                    resident_bytes=sum(int(part) for part in _RESIDENT.findall(text)) * KiB,
                )

    def _room(self, of_cgroup: bool | None) -> str:
        """Return the available memory as text; None: it is unknown which limit was hit."""
        machine = int(psutil.virtual_memory().total)
        limits = [
            limit
            for folder in cgroup_folders("memory", self.proc_root, self.sys_root)
            for file in ("memory.max", "memory.limit_in_bytes")
            if (limit := sysfs.read_integer(folder / file)) is not None
        ]
        tightest = min(limits, default=machine)
        if tightest < machine and of_cgroup is not False:
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


def _records(kernel_log: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of the records in the kernel's log; none if it cannot be read."""
    for number, text in _RECORD.findall(_read_all(kernel_log)):
        yield int(number), text.decode(errors="replace")


def _read_all(kernel_log: Path) -> bytes:
    try:
        descriptor = os.open(kernel_log, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return b""
    pieces: list[bytes] = []
    try:
        # Each read returns one record.
        while True:
            try:
                piece = os.read(descriptor, _LONGEST_RECORD)
            except BrokenPipeError:
                continue  # some were overwritten before they could be read
            if not piece:
                break
            pieces.append(piece)
    except OSError:
        pass  # no more records, or no permission
    finally:
        os.close(descriptor)
    return b"".join(pieces)
