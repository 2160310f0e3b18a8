"""Files of JSON lines that only grow: a torn or damaged line is passed over, and so is what follows the bound."""

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# A run that fails a thousand times must not fill the disk; its first failures are the ones to read.
_LARGEST_FILE_BYTES = 16 * 2**20
_LONGEST_LINE_BYTES = 4 * 2**20
_LAST_UNIX_S = 1e11  # some thousand years on


def append_line(path: Path, content: Mapping[str, object]) -> None:
    """Add a line, in one write so that several processes may; a full disk must not end the run."""
    data = json.dumps(content, ensure_ascii=False, default=str).encode("utf-8", errors="replace")
    if len(data) > _LONGEST_LINE_BYTES:
        return
    with contextlib.suppress(OSError), path.open("a+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size <= _LARGEST_FILE_BYTES:
            stream.write(_line_end_if_torn(stream, size) + data + b"\n")


def _line_end_if_torn(stream: io.FileIO, size: int) -> bytes:
    """Return what sets the next line apart from one that was cut off by a crash."""
    if not size:
        return b""
    stream.seek(size - 1)
    return b"" if stream.read(1) == b"\n" else b"\n"


def unix_s(value: object) -> float:
    """Return a time as it was written down; raises ValueError for what is none that a calendar has."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a time: {value!r}")
    if not 0 <= value < _LAST_UNIX_S:  # nor is NaN
        raise ValueError(f"not a time: {value!r}")
    return float(value)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are whole; nothing where there is no such file."""
    try:
        stream = path.open("rb")
    except OSError:
        return
    with stream:
        for line in stream:
            with contextlib.suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict):
                    yield content
