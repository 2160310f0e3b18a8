"""Bound the disk space of logs that other processes append to.

The middle of a log that grew too large is freed (Linux: ``fallocate`` with a hole); its beginning and its end stay, at their
places, so that nobody who writes or reads it notices. Reading a hole gives zero bytes.
"""

import ctypes
import errno
import os
import sys
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK = 512  # the unit of st_blocks


def limit_log(path: Path, limit_bytes: int, *, read_to: int | None = None) -> bool:
    """Free the middle of a log that takes more than a limit; return whether something was freed.

    A quarter of the limit is kept at the beginning and half of it at the end, and everything after ``read_to``. Raises
    ``OSError`` on file systems without holes.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(errno.EOPNOTSUPP, "this system has no files with holes")
    with path.open("r+b", buffering=0) as stream:
        state = os.fstat(stream.fileno())
        begin = limit_bytes // 4
        end = state.st_size - limit_bytes // 2
        end = end if read_to is None else min(end, read_to)
        if state.st_blocks * _BLOCK <= limit_bytes or end <= begin:
            return False
        _free(stream.fileno(), begin, end - begin)
        words = f"\n--- output left out here: this log is limited to {limit_bytes >> 20} MiB ---\n"
        os.pwrite(stream.fileno(), words.encode()[: end - begin], begin)
        return True


def _free(descriptor: int, begin: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _KEEP_SIZE | _PUNCH_HOLE
    if libc.fallocate(descriptor, mode, ctypes.c_long(begin), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
