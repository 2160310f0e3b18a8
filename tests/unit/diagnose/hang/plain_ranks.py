"""Real processes with the environment of ranks, but without torch: they start at once."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from patience import GIVE_UP_S


def environment(port: int, rank: int, world_size: int = 2) -> dict[str, str]:
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "none",
    }


@contextlib.contextmanager
def started(
    script: Path, *, port: int, rank: int = 0, before: Sequence[str] = ()
) -> Iterator[list[int]]:
    """Run a script as a rank until the block ends; yields the numbers in the first line that it prints."""
    with subprocess.Popen(
        [*before, sys.executable, str(script)],
        env=environment(port, rank),
        cwd=script.parent,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        try:
            yield [process.pid, *map(int, process.stdout.readline().split())]
        finally:
            below = _below(process.pid)
            process.kill()
            for one in below:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(below, timeout=GIVE_UP_S)


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []
