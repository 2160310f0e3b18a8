"""Hot spares in a real Slurm job: a node of the allocation waits, and replaces one whose processes are killed."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hosts.spare_training import WHERE, events, log_of
from slurm.slurm_lab import SlurmLab, await_until
from slurm.test_muster_run import CPU, living_ranks, submitted
from torchmuster.launch.history.run_state import TAKEOVER

pytestmark = pytest.mark.nightly


def kill_node(cluster: SlurmLab, machine: str) -> float:
    """Kill the node agent of a machine and all that it started; Slurm's own processes stay."""
    for pid in cluster.pids_on(machine):
        with suppress(OSError):
            if b"torchmuster" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    return time.time()


def test_a_node_of_the_job_is_a_spare_and_takes_over(cluster: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    options = ("--nodes", "2", "--spares", "1", *CPU, "where.py")
    job = submitted(*options, cwd=tmp_path)

    def on(number: int, rank: int, node: str) -> bool:
        with suppress(ValueError):
            return f"round {number}: rank {rank} on {node}" in log_of(tmp_path, rank)
        return False

    await_until(lambda: on(0, 0, "node1") and on(0, 1, "node2"), f"job {job.number} trains")
    kill_node(cluster, "node2")
    await_until(lambda: on(1, 0, "node1") and on(1, 1, "node3"), "the spare took over")
    (tmp_path / "end").touch()
    job.await_end()
    (taken,) = events(tmp_path, TAKEOVER)
    assert (taken["host"], taken["spare"]) == ("node2", "node3"), job.output
    await_until(lambda: not living_ranks(tmp_path), "no rank is left")
