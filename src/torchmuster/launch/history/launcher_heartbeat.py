"""How a machine that cannot see a run's launcher knows whether it lives.

The launcher touches the run's ``state.json`` for as long as it lives; on a shared disk everybody sees that.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Shared disks may show a file's time a minute late.
_EVERY_S = 30.0
SILENT_AFTER_S = 120.0


@contextlib.contextmanager
def heard_of(state: Path) -> Iterator[None]:
    """Let other machines see, for as long as this lasts, that the run's launcher lives."""
    task = asyncio.get_running_loop().create_task(_touch_often(state))
    try:
        yield
    finally:
        task.cancel()


async def _touch_often(path: Path) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.utime, path)  # a shared disk may take its time


def silent_for_s(state: Path) -> float:
    """Return for how long nothing was heard of a launcher, by the clock of the disk where in doubt."""
    try:
        heard = state.stat().st_mtime
    except OSError:
        return 0.0
    silent_s = time.time() - heard
    if not 0 <= silent_s < SILENT_AFTER_S:
        # A disk that cannot be written to from here leaves only this machine's clock.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=state.parent) as written_now:
            silent_s = os.fstat(written_now.fileno()).st_mtime - heard
    return max(0.0, silent_s)
