"""Shared memory: /dev/shm, through which DataLoader workers, gloo and NCCL exchange data."""

import os
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.units import MiB, format_bytes

FOLDER = "/dev/shm"  # noqa: S108
# The default of Docker, Podman and Kubernetes; bare-metal hosts have gigabytes.
_CONTAINER_DEFAULT_BYTES = 64 * MiB
_BARELY_ANY_BYTES = MiB
_LARGER = """docker run --shm-size=8g …  # or --ipc=host
shm_size: 8gb  # in a Docker Compose file, under the service
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]  # Kubernetes, mounted at /dev/shm
sudo mount -o remount,size=90% /dev/shm  # outside containers"""


def check_shared_memory(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the size and free space of /dev/shm."""
    try:
        room = os.statvfs(surroundings.path(FOLDER))
    except OSError:
        yield _missing()
        return
    total, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    seen = f"{format_bytes(total)} at {FOLDER}, {format_bytes(free)} of it free"
    findings = list(_findings(total, free, seen))
    if not findings:
        findings.append(Finding(name="shared-memory", status=Status.OK, what=seen))
    yield from findings


def _findings(total: int, free: int, seen: str) -> Iterator[Finding]:
    small = total <= _CONTAINER_DEFAULT_BYTES
    if small:
        yield Finding(
            name="shared-memory-small",
            status=Status.WARNING,
            what=f"{FOLDER} has only {format_bytes(total)}",
            why="this is the default of a container. One batch of 64 images takes 37 MiB, and "
            "each DataLoader worker holds two. Workers and NCCL fail with “Bus error” or “unable "
            "to allocate shared memory”",
            fix=_LARGER,
            evidence=seen,
        )
    if free < (_BARELY_ANY_BYTES if small else _CONTAINER_DEFAULT_BYTES):
        yield Finding(
            name="shared-memory-full",
            status=Status.FAILURE if free < _BARELY_ANY_BYTES else Status.WARNING,
            what=f"{FOLDER} is full: {format_bytes(free)} of {format_bytes(total)} are free",
            why="DataLoader workers and NCCL allocate buffers in it and fail with “Bus error” or "
            "“No space left on device”",
            fix=f"ls -lS {FOLDER} | head  # the largest files and their owners",
            evidence=seen,
        )


def _missing() -> Finding:
    return Finding(
        name="shared-memory-missing",
        status=Status.FAILURE,
        what=f"{FOLDER} does not exist",
        why="DataLoader workers, gloo and NCCL exchange data through it and cannot start",
        fix=f"sudo mkdir -p {FOLDER} && sudo mount -t tmpfs -o size=50%,mode=1777 tmpfs {FOLDER}",
    )


CHECKS = (
    Check(
        name="shared-memory",
        asks="Is there enough free space in /dev/shm?",
        run=check_shared_memory,
        systems=("linux",),
    ),
)
