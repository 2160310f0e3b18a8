"""The temporary folder of a node agent.

The node agent and its reaper each hold a shared lock on it, and whichever exits last removes it. If both were killed,
the next node agent of the same user does so.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from torchmuster.devices.claims import AVAILABLE

if AVAILABLE:  # not on Windows
    import fcntl

_PREFIX = "torchmuster-node-"
# A folder that is younger may not be locked yet.
_OLD_S = 60.0


def create_agent_folder() -> Path:
    """Create a folder, and remove those whose node agent and reaper were killed."""
    _remove_abandoned()
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def hold_agent_folder(folder: Path) -> int | None:
    """Lock a folder until the returned file is closed, or this process exits; None without locks."""
    if not AVAILABLE:
        return None
    file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _remove_abandoned() -> None:
    if not AVAILABLE:
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or of another user
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if is_own and time.time() - found.st_mtime > _OLD_S:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)
