"""Logs that stay on their host: where they are, what of them is sent, and their deletion.

With thousands of ranks, all output in one place is neither readable nor affordable. A host keeps the logs of its ranks, and sends
rank 0's output and the first error that one of its ranks prints. ``muster logs --rank N`` fetches the end of any log.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from torchmuster.errors import Impossible
from torchmuster.launch import protocol

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")  # it comes from the launcher
_KEPT_FOR_S = 14 * 86400.0
_LINES_OF_AN_ERROR = 40
# The first line of an error that a rank prints: Python's, a library's, or the system's.
_ERROR = re.compile(
    r"^(?:.{0,40}Traceback \(most recent call last\)|(?:\w+\.)*\w*(?:Error|Exception): |.{0,80}(?:NCCL WARN|CUDA error|"
    r"Segmentation fault|Fatal Python error|terminate called))",
    re.MULTILINE,
)


def kept_folder(run_id: str) -> Path:
    """Return a folder for the logs of a run that outlives the node agent, and delete those of old runs."""
    if not _RUN_ID.fullmatch(run_id):
        raise Impossible(f"{run_id!r} is not a valid run id, so its logs cannot be kept")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    root = Path(tempfile.gettempdir()) / f"torchmuster-logs-{user}"
    root.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and (root.is_symlink() or root.stat().st_uid != os.getuid()):
        raise PermissionError(f"{root} belongs to another user")
    for old in root.iterdir():
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (old, *old.iterdir()))
            if time.time() - written > _KEPT_FOR_S:
                shutil.rmtree(old)
    folder = root / run_id
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class FirstError:
    """Finds the first error in the output of a host's ranks."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._left = _LINES_OF_AN_ERROR

    def look(self, rank: int, text: str) -> str:
        """Return the part of a rank's new output that belongs to the first error; usually nothing."""
        if self._rank is None and (found := _ERROR.search(text)):
            self._rank = rank
            text = text[found.start() :]
        if rank != self._rank or not self._left:
            return ""
        lines = text.splitlines(keepends=True)[: self._left]
        self._left -= len(lines)
        return "".join(lines)


def end_of_log(folder: Path, rank: int, most_bytes: int) -> protocol.LogEnd:
    """Return the end of a rank's log."""
    path = folder / f"rank-{rank}.log"
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size_bytes - most_bytes))
            data = stream.read(most_bytes)
    except OSError as error:
        return protocol.LogEnd(rank=rank, path=str(path), problem=error.strerror or str(error))
    if size_bytes > len(data):  # begin with a whole line
        data = data.partition(b"\n")[2] or data
    text = data.decode("utf-8", errors="replace")
    return protocol.LogEnd(rank=rank, path=str(path), size_bytes=size_bytes, text=text)
