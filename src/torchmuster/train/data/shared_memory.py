"""Room in /dev/shm for the batches that a loader's workers hand over.

Where there is none, a worker dies with “Bus error” and nothing says why. So workers measure each batch
before they put it there.
"""

import os
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.units import format_bytes

FOLDER = "/dev/shm"  # noqa: S108

_FIX = """docker run --shm-size=8g …  # or --ipc=host
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]  # Kubernetes, mounted at /dev/shm
fewer workers, smaller micro-batches, or workers=0, which needs no shared memory"""


def free_bytes(folder: str = FOLDER) -> int | None:
    """Return what is free of shared memory; None where there is no such folder (macOS, Windows)."""
    try:
        room = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return room.f_frsize * room.f_bavail


@dataclass(frozen=True, kw_only=True)
class Room:
    """What was free before the workers started, and who shares it."""

    free_bytes: int | None
    workers: int  # of this rank
    batches: int  # of this rank, on their way at once
    ranks: int  # of this machine

    def refusal(self, batch_bytes: int) -> Impossible | None:
        """Return why batches of this size cannot be handed over; None where they can."""
        needed = batch_bytes * self.batches * self.ranks
        if self.free_bytes is None or needed <= self.free_bytes:
            return None
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} on this machine"
        return Impossible(
            f"{FOLDER} is too small for {self.workers} loader worker{'s' if self.workers > 1 else ''}: "
            f"{format_bytes(needed)} are needed, {format_bytes(self.free_bytes)} are free",
            why=f"workers hand batches over through it: {format_bytes(batch_bytes)} a batch x "
            f"{self.batches} on their way x {ranks}; without room they die with “Bus error”",
            fix=_FIX,
        )
