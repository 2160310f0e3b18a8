"""Which filesystem a folder is on."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torchmuster.diagnose.check import Surroundings

# The kernel writes a space in a name as \040.
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted filesystem: where, of which kind, from what, and how."""

    folder: str
    kind: str
    source: str
    options: tuple[str, ...]


def mount_of(folder: Path, surroundings: Surroundings) -> Mount | None:
    """Return the filesystem that a folder is on; None where the system does not tell."""
    wanted = PurePosixPath(folder.resolve().as_posix())
    found = None
    for line in (surroundings.text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 6 or len(kind) < 2:
            continue
        place = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4])
        # The last one mounted at a place hides those before it.
        if wanted.is_relative_to(place) and (found is None or len(place) >= len(found.folder)):
            options = tuple(fields[5].split(","))
            found = Mount(folder=place, kind=kind[0], source=kind[1], options=options)
    return found
