"""Storage: the folder for runs."""

import os
import shutil
import tempfile
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, MiB, format_bytes

_BARELY_ANY_BYTES = 16 * MiB
_LITTLE_BYTES = GiB


def run_folder(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the folder for runs, or the nearest parent that exists: missing folders will be created."""
    folder = surroundings.folder
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    if usage.free < _LITTLE_BYTES:
        yield finding(
            "run-folder-full",
            status=Status.FAILURE if usage.free < _BARELY_ANY_BYTES else Status.WARNING,
            folder=folder,
            free=format_bytes(usage.free),
            total=format_bytes(usage.total),
        )
        return
    try:  # permissions alone do not show it (root, NFS, quotas)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        yield finding("run-folder-not-writable", folder=folder, error=error.strerror or error)


CHECKS = (
    Check(
        name="run-folder",
        asks="Is the folder for runs writable, with enough free space?",
        run=run_folder,
    ),
)
