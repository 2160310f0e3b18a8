"""A file of JSON lines that grows: each look reads only what came since the last one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What a look reads at most: a file of gigabytes is caught up with over several looks.
_AT_A_TIME_BYTES = 8 * 2**20


class GrowingFile:
    """Gives the new lines of a file; from the first one again if it was written anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # which file it was, and how far it was read
        self._read_bytes = 0
        self.changed_unix_s: float | None = None
        self.is_behind = False  # whether the last look left something for the next one

    def new_lines(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file begins anew, so that earlier lines do not count, and the new lines."""
        try:
            with self._path.open("rb") as stream:
                found = os.fstat(stream.fileno())
                identity = (found.st_dev, found.st_ino)
                anew = identity != self._file or found.st_size < self._read_bytes
                if anew:
                    self._file, self._read_bytes = identity, 0
                stream.seek(self._read_bytes)
                data = stream.read(_AT_A_TIME_BYTES)
        except OSError:
            return False, []
        self.changed_unix_s = found.st_mtime
        whole = data.rfind(b"\n") + 1  # the rest is being written
        if not whole and len(data) == _AT_A_TIME_BYTES:
            whole = len(data)  # a line of this length is none of ours
        self._read_bytes += whole
        self.is_behind = len(data) == _AT_A_TIME_BYTES
        return anew, list(_objects(data[:whole]))


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            content = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        if isinstance(content, dict):
            yield content
