"""Memory: how much there is, which limit applies, and whether it is nearly used up."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.devices.readers import sysfs
from torchmuster.devices.readers.cpu import cgroup_folders, reclaimable_bytes
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, KiB, MiB, format_bytes

# Memory of a rank before it loads a model: Python, torch and its libraries.
_RANK_BYTES = 512 * MiB
_SMALL_LIMIT_BYTES = 2 * GiB
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Usable memory, how much of it is free, and the file that limits it, if any."""

    total_bytes: int
    free_bytes: int
    limited_by: str = ""


def check_memory(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the memory of the host and of the cgroup."""
    machine = {
        name: int(size) * KiB
        for name, size in _FIELD.findall(surroundings.text("/proc/meminfo") or "")
    }
    if "MemTotal" not in machine:
        yield Finding(name="memory", status=Status.OK, what="/proc/meminfo is not readable")
        return
    whole = _Room(
        total_bytes=machine["MemTotal"], free_bytes=machine.get("MemAvailable", machine["MemTotal"])
    )
    room = _tightest(surroundings, whole)
    findings = [
        *_limit(room, whole),
        *_nearly_full(room),
    ]
    yield from findings or [Finding(name="memory", status=Status.OK, what=_seen(room, whole))]


def _seen(room: _Room, whole: _Room) -> str:
    part = f" of the host's {format_bytes(whole.total_bytes)}" if room.limited_by else ""
    return f"{format_bytes(room.total_bytes)}{part}, {format_bytes(room.free_bytes)} free"


def _tightest(surroundings: Surroundings, whole: _Room) -> _Room:
    """Return the usable memory: limits apply at every level above this process's cgroup."""
    room = whole
    for folder in cgroup_folders("memory", surroundings.path("/proc"), surroundings.path("/sys")):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = sysfs.read_integer(folder / limit_file)
            if limit is None or limit >= room.total_bytes:
                continue  # cgroup v1 writes "no limit" as a huge number
            used = (sysfs.read_integer(folder / used_file) or 0) - reclaimable_bytes(folder)
            free = min(whole.free_bytes, limit - max(used, 0))
            path = "/" + (folder / limit_file).relative_to(surroundings.root).as_posix()
            room = _Room(total_bytes=limit, free_bytes=max(free, 0), limited_by=path)
    return room


def _limit(room: _Room, whole: _Room) -> Iterator[Finding]:
    if not room.limited_by or room.total_bytes > whole.total_bytes / 2:
        return
    small = room.total_bytes < _SMALL_LIMIT_BYTES
    yield finding(
        "memory-limit",
        status=Status.WARNING if small else Status.NOTE,
        total_bytes=format_bytes(room.total_bytes),
        host_bytes=format_bytes(whole.total_bytes),
        why_detail="; one rank alone needs about 0.5 GiB before it loads a model" if small else "",
        limited_by=room.limited_by,
        room_total_bytes=room.total_bytes,
    )


def _nearly_full(room: _Room) -> Iterator[Finding]:
    if room.free_bytes >= max(_RANK_BYTES, room.total_bytes // 100):
        return
    yield finding(
        "memory-full",
        free_bytes=format_bytes(room.free_bytes),
        total_bytes=format_bytes(room.total_bytes),
        limited_by=room.limited_by or "/proc/meminfo",
    )


CHECKS = (
    Check(
        name="memory",
        asks="Is there enough memory for training, and which limit applies?",
        run=check_memory,
        systems=("linux",),
    ),
)
