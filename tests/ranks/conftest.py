"""Fixtures for programs that run as several real ranks (gloo, on this machine)."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S

# What a launcher sets; the tests' own surroundings must not leak into the ranks.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")


@dataclass(frozen=True)
class Ran:
    """What a program did."""

    code: int
    out: str
    err: str

    def of_rank(self, rank: int) -> list[str]:
        """Return the lines that begin with ``[rank N] ``, without it."""
        mark = f"[rank {rank}] "
        return [line[len(mark) :] for line in self.out.splitlines() if line.startswith(mark)]


Python = Callable[..., Ran]
Torchrun = Callable[..., Ran]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run Python with these words in a folder of the test's own."""

    def run(*words: str, env: Mapping[str, str] | None = None, within_s: float = GIVE_UP_S) -> Ran:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=within_s)
            except BaseException:
                _end_with_ranks(process.pid)  # ranks outlive an agent that is killed
                raise
        return Ran(process.returncode, out, err)

    return run


def _end_with_ranks(pid: int) -> None:
    agent = psutil.Process(pid)
    for process in [*agent.children(recursive=True), agent]:
        process.kill()


@pytest.fixture
def torchrun(python: Python) -> Torchrun:
    """Run a program as so many ranks under plain torchrun, at a port of its own finding."""

    def run(
        *words: str,
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        within_s: float = GIVE_UP_S,
    ) -> Ran:
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return python(*agent, *words, env=env, within_s=within_s)

    return run
