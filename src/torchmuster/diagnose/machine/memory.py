"""Memory: how much there is, which limit applies, and whether it is nearly used up."""

from collections.abc import Iterator

from torchmuster.devices.readers.cpu import host_memory, usable_memory
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, MiB, format_bytes

# Memory of a rank before it loads a model: Python, torch and its libraries.
_RANK_BYTES = 512 * MiB
_SMALL_LIMIT_BYTES = 2 * GiB


def check_memory(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the memory of the host and of the cgroup."""
    host = host_memory()
    room = usable_memory(host, surroundings.path("/proc"), surroundings.path("/sys"))
    total = format_bytes(room.total_bytes)
    if room.limited_by is not None and room.total_bytes <= host.total_bytes / 2:
        small = room.total_bytes < _SMALL_LIMIT_BYTES
        yield finding(
            "memory-limit",
            status=Status.WARNING if small else Status.NOTE,
            total_bytes=total,
            host_bytes=format_bytes(host.total_bytes),
            limited_by=room.limited_by,
        )
    free = format_bytes(room.free_bytes)
    if room.free_bytes < max(_RANK_BYTES, room.total_bytes // 100):
        yield finding("memory-full", free_bytes=free, total_bytes=total)


CHECKS = (
    Check(
        name="memory",
        asks="Is there enough memory for training, and which limit applies?",
        run=check_memory,
        systems=("linux",),
    ),
)
