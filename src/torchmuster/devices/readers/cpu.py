"""Read the CPU as a device, and how much of it this process may use.

A container or a Slurm job shows the whole host in /proc, but its control group (cgroup) grants only
a part. Limits apply at every level up to the root, so the lowest one counts.
"""

import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers import sysfs
from torchmuster.devices.readers.apple import sysctl

PROC, SYS = Path("/proc"), Path("/sys")


@dataclass(frozen=True, kw_only=True)
class CpuQuota:
    """A CPU quota in cores, and the file that sets it."""

    cores: float
    file: str


@dataclass(frozen=True, kw_only=True)
class CpuLimit:
    """How many cores (``value``) of those of the host this process may use, and why.

    ``quota`` is set if the cgroup's quota is what limits it; ``allowed`` are the cores in its
    affinity mask.
    """

    value: int
    machine: int
    allowed: int
    quota: CpuQuota | None = None

    @property
    def reason(self) -> str:
        """The limit, as one line."""
        if self.quota is not None:
            reason = f"this cgroup's CPU quota is {round(self.quota.cores, 2)} ({self.quota.file})"
            if self.allowed < self.machine:
                reason += f"; the affinity mask alone would allow {self.allowed}"
        elif self.allowed < self.machine:
            reason = "the affinity mask of this process (taskset, cpuset or Slurm) allows no others"
        else:
            return f"all {self.machine} cores: no affinity mask or cgroup CPU quota limits this process"
        return f"{self.value} of {self.machine} cores: {reason}"


def read_cpu(proc_root: Path = PROC, sys_root: Path = SYS, system: str | None = None) -> Device:
    """Return the CPU, with the part of the host's memory that this process may use."""
    total = used = None
    with suppress(OSError, ValueError, psutil.Error):
        room = usable_memory(host_memory(), proc_root, sys_root)
        total, used = room.total_bytes, room.total_bytes - room.free_bytes
    return Device(
        kind=DeviceKind.CPU,
        index=0,
        uuid="CPU-0",
        name=_name(proc_root, system or platform.system()),
        total_bytes=total,
        used_bytes=used,
    )


def usable_cores(proc_root: Path = PROC, sys_root: Path = SYS) -> CpuLimit:
    """Return how many cores this process may use, and what limits them."""
    machine = os.cpu_count() or 1
    allowed = min(_affinity(), machine)
    quota = min(_quotas(proc_root, sys_root), key=lambda quota: quota.cores, default=None)
    if quota is not None:
        granted = max(1, math.ceil(quota.cores))
        if granted < allowed:
            return CpuLimit(value=granted, machine=machine, allowed=allowed, quota=quota)
    return CpuLimit(value=allowed, machine=machine, allowed=allowed)


def _affinity() -> int:
    # macOS has no affinity masks.
    getter = getattr(os, "sched_getaffinity", None)
    return len(getter(0)) if getter else os.cpu_count() or 1


def _name(proc_root: Path, system: str) -> str:
    known = sysctl("machdep.cpu.brand_string") if system == "Darwin" else None
    try:
        # Do not read all of it: on a large host the file is long and slow to generate.
        with (proc_root / "cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            models = (line.partition(":")[2].strip() for line in lines if _names_model(line))
            known = known or next(models, None)
    except OSError:
        pass
    return known or platform.processor() or platform.machine() or "CPU"


def _names_model(line: str) -> bool:
    return line.partition(":")[0].strip().lower() in ("model name", "cpu model")


@dataclass(frozen=True, kw_only=True)
class MemoryRoom:
    """Usable memory, how much of it is free, and the cgroup's file that limits it, if one does."""

    total_bytes: int
    free_bytes: int
    limited_by: Path | None = None


def host_memory() -> MemoryRoom:
    """Return the memory of the host."""
    memory = psutil.virtual_memory()
    return MemoryRoom(total_bytes=int(memory.total), free_bytes=int(memory.available))


def usable_memory(machine: MemoryRoom, proc_root: Path = PROC, sys_root: Path = SYS) -> MemoryRoom:
    """Return what the cgroups of this process grant of the host's memory, at the tightest level."""
    total, free, limited_by = machine.total_bytes, machine.free_bytes, None
    for folder in cgroup_folders("memory", proc_root, sys_root):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = sysfs.read_integer(folder / limit_file)
            if limit is None or limit >= machine.total_bytes:
                continue  # cgroup v1 writes "no limit" as a huge number
            used = sysfs.read_integer(folder / used_file) or 0
            free = min(free, limit - used + _reclaimable_bytes(folder))
            if limit < total:
                total, limited_by = limit, folder / limit_file
    free = max(0, min(free, total))
    return MemoryRoom(total_bytes=total, free_bytes=free, limited_by=limited_by)


def _reclaimable_bytes(folder: Path) -> int:
    """Return the cached file pages that the kernel drops before it refuses memory."""
    counts: dict[str, str] = {}
    for line in (sysfs.read_text(folder / "memory.stat") or "").splitlines():
        name, _, count = line.partition(" ")
        counts[name] = count
    return int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)


def _quotas(proc_root: Path, sys_root: Path) -> Iterator[CpuQuota]:
    for folder in cgroup_folders("cpu", proc_root, sys_root):
        quota, _, period = (sysfs.read_text(folder / "cpu.max") or "").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield CpuQuota(cores=int(quota) / int(period), file="cpu.max")
        allowance = sysfs.read_integer(folder / "cpu.cfs_quota_us")
        length = sysfs.read_integer(folder / "cpu.cfs_period_us")
        if allowance and length and allowance > 0:
            yield CpuQuota(cores=allowance / length, file="cpu.cfs_quota_us")


def cgroup_folders(controller: str, proc_root: Path, sys_root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, for one controller."""
    paths = dict(_memberships(proc_root))
    for line in (sysfs.read_text(proc_root / "self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        fields = left.split()
        key = "" if kind == "cgroup2" else controller
        mounted = kind == "cgroup2" or (kind == "cgroup" and controller in _options(options))
        if mounted and key in paths and len(fields) > 4:
            inside = _below(PurePosixPath(paths[key]), PurePosixPath(fields[3]))
            top = sys_root / fields[4].removeprefix("/sys/")
            for level in (inside, *inside.parents):
                yield top / level


def _memberships(proc_root: Path) -> Iterator[tuple[str, str]]:
    """Yield controller and path for each line of ``/proc/self/cgroup``; version 2 has no name."""
    for line in (sysfs.read_text(proc_root / "self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _options(text: str) -> list[str]:
    return text.rpartition(" ")[2].split(",")


def _below(path: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """Return a cgroup's path below the mount, or the mount itself if the path is outside it."""
    if path.is_relative_to(mounted) and ".." not in path.parts:
        return path.relative_to(mounted)
    return PurePosixPath()
