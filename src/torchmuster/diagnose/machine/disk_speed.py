"""How fast the disk below the run folder is, measured by writing a little to it."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchmuster.diagnose.check import Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.units import MiB, format_bytes

_WRITTEN_BYTES = 8 * MiB
_SLOW_BYTES_PER_S = 20 * 10**6
_SLOW_SYNC_S = 0.5
# Others may use the disk at the moment, so the best of several tries counts.
_TRIES = 3
_PAUSE_S = 0.3
_BUDGET_S = 12.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The best that was seen."""

    bytes_per_s: float
    sync_s: float

    @property
    def writes_slowly(self) -> bool:
        """Whether large checkpoints would hold up training."""
        return self.bytes_per_s < _SLOW_BYTES_PER_S

    @property
    def is_slow(self) -> bool:
        """Whether logs and checkpoints would hold up training, be they large or many."""
        return self.writes_slowly or self.sync_s > _SLOW_SYNC_S


def run(surroundings: Surroundings) -> Iterator[Finding]:
    """Write and make durable a few MiB; say so if even the best try was slow."""
    folder = next(
        one for one in (surroundings.folder, *surroundings.folder.parents) if one.is_dir()
    )
    try:
        speed = measure(folder)
    except OSError as error:  # the check of the run folder says what is wrong with it
        yield Finding(name="disk-speed", status=Status.OK, what=f"not measured: {error.strerror}")
        return
    seen = (
        f"{format_bytes(round(speed.bytes_per_s))}/s to {folder}, a small file is safe after "
        f"{speed.sync_s * 1000:.1f} ms"
    )
    if not speed.is_slow:
        yield Finding(name="disk-speed", status=Status.OK, what=seen)
        return
    if speed.writes_slowly:
        how = f"is slow: {format_bytes(round(speed.bytes_per_s))}/s"
        minutes = 10 * 1024 * MiB / speed.bytes_per_s / 60
        why = f"a checkpoint of 10 GiB would take {minutes:.0f} minutes, and the ranks wait for it"
    else:
        how = f"takes {speed.sync_s * 1000:.0f} ms to make a small file safe"
        why = "the ranks wait so long for each file of a checkpoint and each record of a log"
    yield Finding(
        name="disk-slow",
        status=Status.WARNING,
        what=f"the disk below {folder} {how}",
        why=why,
        fix="use a folder on a local disk for runs:\nmuster run --runs /scratch/runs …",
        evidence=f"{seen}; best of {_TRIES} tries with {format_bytes(_WRITTEN_BYTES)}",
    )


def measure(folder: Path) -> Speed:
    """Return the best of a few tries; a disk that is found fast is not tried again."""
    until = time.monotonic() + _BUDGET_S
    best = _try(folder)
    for _ in range(_TRIES - 1):
        if not best.is_slow or time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
        again = _try(folder)
        best = Speed(
            bytes_per_s=max(best.bytes_per_s, again.bytes_per_s),
            sync_s=min(best.sync_s, again.sync_s),
        )
    return best


def _try(folder: Path) -> Speed:
    block = os.urandom(MiB)  # what compresses well would be written in no time
    with tempfile.TemporaryFile(dir=folder) as stream:
        began = time.monotonic()
        for _ in range(_WRITTEN_BYTES // MiB):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
        written = time.monotonic()
        stream.write(b"\0")
        stream.flush()
        os.fsync(stream.fileno())
        ended = time.monotonic()
    return Speed(bytes_per_s=_WRITTEN_BYTES / max(written - began, 1e-6), sync_s=ended - written)
