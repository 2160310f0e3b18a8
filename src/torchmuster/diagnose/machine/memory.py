"""Memory: how much there is, which limit applies, and whether it is nearly used up."""

import re
from collections.abc import Iterator

from torchmuster.devices.readers.cpu import MemoryRoom, usable_memory
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, KiB, MiB, format_bytes

# Memory of a rank before it loads a model: Python, torch and its libraries.
_RANK_BYTES = 512 * MiB
_SMALL_LIMIT_BYTES = 2 * GiB
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def check_memory(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the memory of the host and of the cgroup."""
    sizes: dict[str, str] = dict(_FIELD.findall(surroundings.text("/proc/meminfo") or ""))
    if "MemTotal" not in sizes:
        yield Finding(name="memory", status=Status.OK, what="/proc/meminfo is not readable")
        return
    whole = MemoryRoom(
        total_bytes=int(sizes["MemTotal"]) * KiB,
        free_bytes=int(sizes.get("MemAvailable", sizes["MemTotal"])) * KiB,
    )
    room = usable_memory(whole, surroundings.path("/proc"), surroundings.path("/sys"))
    file = "/proc/meminfo"
    if room.limited_by is not None:
        file = f"/{room.limited_by.relative_to(surroundings.root).as_posix()}"
    part = f" of the host's {format_bytes(whole.total_bytes)}" if room.limited_by else ""
    seen = f"{format_bytes(room.total_bytes)}{part}, {format_bytes(room.free_bytes)} free"
    findings = [*_limit(room, whole, file), *_nearly_full(room, file)]
    yield from findings or [Finding(name="memory", status=Status.OK, what=seen)]


def _limit(room: MemoryRoom, whole: MemoryRoom, file: str) -> Iterator[Finding]:
    if room.limited_by is None or room.total_bytes > whole.total_bytes / 2:
        return
    small = room.total_bytes < _SMALL_LIMIT_BYTES
    yield finding(
        "memory-limit",
        status=Status.WARNING if small else Status.NOTE,
        total_bytes=format_bytes(room.total_bytes),
        host_bytes=format_bytes(whole.total_bytes),
        why_detail="; one rank alone needs about 0.5 GiB before it loads a model" if small else "",
        limited_by=file,
        room_total_bytes=room.total_bytes,
    )


def _nearly_full(room: MemoryRoom, file: str) -> Iterator[Finding]:
    if room.free_bytes >= max(_RANK_BYTES, room.total_bytes // 100):
        return
    yield finding(
        "memory-full",
        free_bytes=format_bytes(room.free_bytes),
        total_bytes=format_bytes(room.total_bytes),
        limited_by=file,
    )


CHECKS = (
    Check(
        name="memory",
        asks="Is there enough memory for training, and which limit applies?",
        run=check_memory,
        systems=("linux",),
    ),
)
