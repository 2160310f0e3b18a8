"""A file of JSON lines that another process appends to."""

import os
from pathlib import Path
from typing import Any

from torchmuster import untrusted

# Maximum bytes per poll: a file of gigabytes is read over several polls.
_AT_A_TIME_BYTES = 8 * 2**20


class GrowingFile:
    """Returns the new lines of a file; starts over if the file was rewritten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # identity of the file, and the read position
        self._read_bytes = 0
        self.changed_unix_s: float | None = None
        self.is_behind = False  # whether the last poll left data unread

    def new_lines(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was rewritten (earlier lines are invalid), and the new lines."""
        try:
            with untrusted.open_regular(self._path) as stream:
                found = os.fstat(stream.fileno())
                identity = (found.st_dev, found.st_ino)
                anew = identity != self._file or found.st_size < self._read_bytes
                if anew:
                    self._file, self._read_bytes = identity, 0
                stream.seek(self._read_bytes)
                data = stream.read(_AT_A_TIME_BYTES)
        except (OSError, untrusted.Unreadable):
            return False, []
        self.changed_unix_s = found.st_mtime
        whole = data.rfind(b"\n") + 1  # the rest is being written
        if not whole and len(data) == _AT_A_TIME_BYTES:
            whole = len(data)  # no valid line is this long
        self._read_bytes += whole
        self.is_behind = len(data) == _AT_A_TIME_BYTES
        return anew, list(untrusted.json_objects(data[:whole]))
