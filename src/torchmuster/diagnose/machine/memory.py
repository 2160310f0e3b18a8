"""Memory: how much there is, which limit applies, and whether it is nearly used up."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.devices.readers import sysfs
from torchmuster.devices.readers.cpu import cgroup_folders, reclaimable_bytes
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.node.memory_evidence import MemoryWatch
from torchmuster.units import GiB, KiB, MiB, format_bytes

# Memory of a rank before it loads a model: Python, torch and its libraries.
_RANK_BYTES = 512 * MiB
_SMALL_LIMIT_BYTES = 2 * GiB
_STALLED_PERCENT = 10.0
_LITTLE_TO_PROMISE_BYTES = 8 * GiB
_STRICT = "2"  # of vm.overcommit_memory
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_FULL_STALL = re.compile(r"^full .*\bavg60=([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Usable memory, how much of it is free, and the file that limits it, if any."""

    total_bytes: int
    free_bytes: int
    limited_by: str = ""


def check_memory(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the memory of the host and the cgroup, and the kernel's counters."""
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
        *_pressure(surroundings),
        *_kills(surroundings),
        *_overcommit(surroundings, machine),
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
    yield Finding(
        name="memory-limit",
        status=Status.WARNING if small else Status.NOTE,
        what=f"only {format_bytes(room.total_bytes)} of the host's "
        f"{format_bytes(whole.total_bytes)} of memory can be used",
        why="a cgroup (container, Slurm job, systemd unit) sets the limit; the kernel kills a "
        "process that exceeds it, without a message (exit code 137)"
        + ("; one rank alone needs about 0.5 GiB before it loads a model" if small else ""),
        fix="docker run --memory=32g …\n"
        "resources: {limits: {memory: 32Gi}}  # Kubernetes, in the container\n"
        "#SBATCH --mem=32G  # Slurm",
        evidence=f"{room.limited_by}: {room.total_bytes}",
    )


def _nearly_full(room: _Room) -> Iterator[Finding]:
    if room.free_bytes >= max(_RANK_BYTES, room.total_bytes // 100):
        return
    yield Finding(
        name="memory-full",
        status=Status.WARNING,
        what=f"memory is nearly full: {format_bytes(room.free_bytes)} of "
        f"{format_bytes(room.total_bytes)} are free",
        why="each rank needs about 0.5 GiB before it loads a model; the kernel kills processes "
        "when memory runs out",
        fix="ps -eo pid,user,rss,args --sort=-rss | head  # the largest processes; stop unneeded "
        "ones",
        evidence=f"{room.limited_by or '/proc/meminfo'}",
    )


def _pressure(surroundings: Surroundings) -> Iterator[Finding]:
    found = _FULL_STALL.search(surroundings.text("/proc/pressure/memory") or "")
    if found and float(found[1]) > _STALLED_PERCENT:
        yield Finding(
            name="memory-pressure",
            status=Status.WARNING,
            what=f"all processes were stalled on memory for {float(found[1]):.0f} % of the last "
            f"minute",
            why="the kernel swaps or drops cached files to free memory; training would be very "
            "slow",
            fix="ps -eo pid,user,rss,args --sort=-rss | head  # the largest processes; stop "
            "unneeded ones",
            evidence=f"/proc/pressure/memory: {found[0]}",
        )


def _kills(surroundings: Surroundings) -> Iterator[Finding]:
    watch = MemoryWatch.begin(
        surroundings.path("/proc"), surroundings.path("/sys"), surroundings.path("/dev/kmsg")
    )
    if watch.kills:
        times = "once" if watch.kills == 1 else f"{watch.kills} times"
        yield Finding(
            name="memory-kills",
            status=Status.NOTE,
            what=f"the kernel's OOM killer has killed a process {times} in this cgroup",
            why="memory ran out since the container, job or session started; a rank that exited with "
            "code 137 or -9 was probably one of these processes",
            fix="sudo dmesg -T | grep -i 'killed process'  # shows which process, and when",
        )


def _overcommit(surroundings: Surroundings, machine: dict[str, int]) -> Iterator[Finding]:
    if (surroundings.text("/proc/sys/vm/overcommit_memory") or "").strip() != _STRICT:
        return
    left = machine.get("CommitLimit", 0) - machine.get("Committed_AS", 0)
    tight = left < _LITTLE_TO_PROMISE_BYTES
    yield Finding(
        name="overcommit-strict",
        status=Status.WARNING if tight else Status.NOTE,
        what="memory overcommit is disabled (vm.overcommit_memory is 2)",
        why="CUDA and forked DataLoader workers reserve far more than they use and fail with "
        f"“Cannot allocate memory” although memory is free; {format_bytes(max(left, 0))} can still "
        "be reserved",
        fix="sudo sysctl vm.overcommit_memory=0",
        evidence=f"CommitLimit {format_bytes(machine.get('CommitLimit', 0))}, "
        f"Committed_AS {format_bytes(machine.get('Committed_AS', 0))}",
    )


CHECKS = (
    Check(
        name="memory",
        asks="Is there enough memory for training, and which limit applies?",
        run=check_memory,
        systems=("linux",),
    ),
)
