"""What a machine knows of memory when a process was killed without a word.

The kernel kills with SIGKILL, which leaves no message in the process. It counts such kills in the
control group (cgroup) of the victim, and it names the victim in its log, which not everybody may
read. How much a process used is gone with it, so that has to be looked at while it lives.
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
    """The most memory that processes were seen to use; ask for it regularly while they live."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._proc_root = proc_root
        self._peaks: dict[int, int] = {}
        self.together_bytes = 0  # the most that all of them used at one moment

    def sample(self, pids: Iterable[int]) -> None:
        """Look at these processes now; those that have gone keep the peak they had."""
        together = 0
        for pid in pids:
            peak, now = self._look(pid)
            self._peaks[pid] = max(peak, self._peaks.get(pid, 0))
            together += now
        self.together_bytes = max(self.together_bytes, together)

    def of(self, pid: int) -> int | None:
        """Return the most memory a process was seen to use; None if it was never seen."""
        return self._peaks.get(pid) or None

    def _look(self, pid: int) -> tuple[int, int]:
        """Return peak and present memory; nothing for a process that has gone."""
        if sys.platform != "linux":
            try:
                resident = int(psutil.Process(pid).memory_info().rss)
            except (psutil.Error, OSError):
                return 0, 0
            return resident, resident
        try:
            # Far cheaper than psutil, and it has the true peak, not only that of our samples.
            status = (self._proc_root / str(pid) / "status").read_bytes()
        except OSError:
            return 0, 0
        peak, now = _PEAK.search(status), _NOW.search(status)  # a zombie has neither
        return (int(peak[1]) * KiB if peak else 0), (int(now[1]) * KiB if now else 0)


@dataclass(frozen=True, kw_only=True)
class _Victim:
    """A process that the kernel says it killed."""

    pid: int
    of_cgroup: bool
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """How things stood before the start, so that what came since can be told from what was before.

    ``kills`` is the cgroup's count of out-of-memory kills, None where it cannot be read.
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
        """Note how things stand now."""
        return cls(
            proc_root=proc_root,
            sys_root=sys_root,
            kernel_log=kernel_log,
            kills=_kills(proc_root, sys_root),
            last_record=max((number for number, _ in _records(kernel_log)), default=-1),
        )

    def explain(self, pid: int, exit_code: int, peaks: MemoryPeaks | None = None) -> str:
        """Say what is known of the memory of a process that ended badly; "" if nothing is.

        A text that begins with ``KERNEL_KILLED_IT`` is certain of that.
        """
        victims = list(self._victims())
        named = next((victim for victim in victims if victim.pid == pid), None)
        now = _kills(self.proc_root, self.sys_root)
        more = 0 if self.kills is None or now is None else now - self.kills
        if exit_code not in _KILLED:
            return _of_others(more) if exit_code > 0 else ""
        seen = (peaks.of(pid) if peaks else None) or 0
        peak = max(seen, named.resident_bytes if named else 0) or None
        if named is None and more <= 0:
            words = [] if self.kills is None else ["the kernel did not do it for want of memory"]
            return "; ".join([*words, *([f"its peak was {format_bytes(peak)}"] if peak else [])])
        # In a container the kernel's log has other process ids; the kind of shortage still holds.
        of_cgroup = named.of_cgroup if named else any(one.of_cgroup for one in victims) or None
        room = self._room(of_cgroup)
        if peak is None:
            return f"{KERNEL_KILLED_IT}; the limit is {room}"
        together = ""
        if peaks and peaks.together_bytes > 1.1 * peak:
            together = f", with the other ranks {format_bytes(peaks.together_bytes)},"
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
        """Say how much memory there was to use; None: it is not known which limit was hit."""
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
        return f"the {format_bytes(machine)} this machine has"


def _of_others(kills: int) -> str:
    if kills <= 0:
        return ""
    processes = "a process" if kills == 1 else f"{kills} processes"
    return f"the kernel killed {processes} of this job meanwhile: out of memory"


def _kills(proc_root: Path, sys_root: Path) -> int | None:
    """Return the count of this process's own cgroup: others' victims are counted above it.

    Version 2 counts in memory.events, version 1 in memory.oom_control.
    """
    for folder in cgroup_folders("memory", proc_root, sys_root):
        for file in ("memory.events", "memory.oom_control"):
            for line in (sysfs.read_text(folder / file) or "").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.strip().isdecimal():
                    return int(count)
    return None


def _records(kernel_log: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of the records in the kernel's log; none where it may not be read."""
    for number, text in _RECORD.findall(_read_all(kernel_log)):
        yield int(number), text.decode(errors="replace")


def _read_all(kernel_log: Path) -> bytes:
    try:
        descriptor = os.open(kernel_log, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return b""
    pieces: list[bytes] = []
    try:
        # Each read gives one record.
        while True:
            try:
                piece = os.read(descriptor, _LONGEST_RECORD)
            except BrokenPipeError:
                continue  # some were overwritten before they could be read
            if not piece:
                break
            pieces.append(piece)
    except OSError:
        pass  # no more for now, or not for us
    finally:
        os.close(descriptor)
    return b"".join(pieces)
