"""Where a host writes the logs of its ranks."""

import os
import re
import tempfile
from pathlib import Path

from torchmuster.errors import Impossible

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")  # it comes from the launcher


def create(run: str | None, run_id: str) -> Path:
    """Return the folder of the logs: ``logs`` in the run folder as this host sees it.

    On a shared file system that is one folder for all hosts. Where the run folder cannot be created, the logs go below the
    system's folder for temporary files.
    """
    if run is not None:
        logs = Path(run) / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            return logs
    if not _RUN_ID.fullmatch(run_id):
        raise Impossible(f"{run_id!r} is not a valid run id, so its logs cannot be written")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    root = Path(tempfile.gettempdir()) / f"torchmuster-logs-{user}"
    root.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and (root.is_symlink() or root.stat().st_uid != os.getuid()):
        raise PermissionError(f"{root} belongs to another user")
    logs = root / run_id
    logs.mkdir(mode=0o700, exist_ok=True)
    return logs
