"""Shared memory: /dev/shm, through which DataLoader workers, gloo and NCCL exchange data."""

import os
from collections.abc import Iterator
from typing import Any

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
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
    room = os.statvfs(surroundings.path(FOLDER))
    total, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    texts: dict[str, Any] = {
        "folder": FOLDER,
        "total": format_bytes(total),
        "free": format_bytes(free),
    }
    small = total <= _CONTAINER_DEFAULT_BYTES
    if small:
        yield finding("shared-memory-small", larger=_LARGER, **texts)
    if free < _BARELY_ANY_BYTES:
        yield finding("shared-memory-full", status=Status.FAILURE, **texts)
    elif free < _CONTAINER_DEFAULT_BYTES and not small:
        yield finding("shared-memory-full", status=Status.WARNING, **texts)


CHECKS = (
    Check(
        name="shared-memory",
        asks="Is there enough free space in /dev/shm?",
        run=check_shared_memory,
        systems=("linux",),
    ),
)
