"""``muster run`` through a real Slurm: submitted, inside an allocation, cancelled, warned, refused."""

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from muster_command import muster_argv
from patience import GIVE_UP_S
from slurm.slurm_lab import SlurmLab, SubmittedJob, await_until
from torchmuster.launch.node import process_cleanup

SMOKE = (str(Path(__file__).resolve().parents[2] / "examples" / "train_torchrun.py"),)
CPU = ("--device", "cpu", "--ranks", "1")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"


def run(*words: str, cwd: Path, before: tuple[str, ...] = ()) -> tuple[int, str]:
    done = subprocess.run(
        [*before, *muster_argv(["run", *words])],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GIVE_UP_S,
    )
    return done.returncode, done.stdout


def living_ranks(folder: Path) -> list[psutil.Process]:
    """The processes of the runs in a folder that are alive, on whichever node."""
    jobs = [json.loads(path.read_text()) for path in folder.glob("runs/*/job.json")]
    assert jobs
    return [process for job in jobs for process in process_cleanup.processes_of(job["token"])]


def submitted(*words: str, cwd: Path) -> SubmittedJob:
    """Submit a job with ``muster run --slurm``."""
    code, said = run("--slurm", *words, cwd=cwd)
    assert code == 0, said
    number = re.findall(r"\d+", said)[0]
    return SubmittedJob(number=number, log=cwd / "runs" / f"slurm-{number}.log")


def smoke_lines(nodes: int) -> set[str]:
    numbers = list(range(nodes))
    return {
        line
        for rank in numbers
        for line in (
            f"[rank {rank}] world_size={nodes} device=cpu hostname=node{rank + 1}",
            f"[rank {rank}] gathered={numbers}",
            f"[rank {rank}] barrier OK; shutting down",
        )
    }


def test_a_job_on_three_nodes_is_submitted(cluster: SlurmLab, tmp_path: Path) -> None:
    job = submitted("--nodes", "3", *CPU, *SMOKE, cwd=tmp_path)
    assert job.await_end() == "COMPLETED None node[1-3]", job.output
    assert smoke_lines(3) <= set(job.output.splitlines())
    assert "3 ranks started" in job.output


@pytest.mark.nightly
def test_a_cancelled_job_leaves_nothing_and_says_so(cluster: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time\nprint('running', flush=True)\ntime.sleep(600)\n"
    )
    job = submitted("--nodes", "2", *CPU, "train.py", cwd=tmp_path)
    job.await_output("running")
    cluster.run("scancel", job.number)
    assert job.await_end().startswith("CANCELLED")
    await_until(lambda: not living_ranks(tmp_path), "no rank is left")


def test_a_failing_rank_fails_the_job_with_its_cause(cluster: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nassert os.environ['RANK'] != '1', 'no data here'\ntime.sleep(600)\n"
    )
    job = submitted("--nodes", "2", *CPU, "train.py", cwd=tmp_path)
    assert job.await_end().startswith("FAILED")
    job.await_output("failure  rank 1 on node2 ")
    assert "AssertionError: no data here" in job.output
    assert not living_ranks(tmp_path)


WARNED = """
import signal, sys, time
def warned(*_):
    print("warned", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, warned)
print("running", flush=True)
time.sleep(600)
"""


@pytest.mark.nightly
def test_the_warning_before_the_end_reaches_every_rank(cluster: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WARNED)
    job = submitted("--nodes", "2", *CPU, "train.py", cwd=tmp_path)
    await_until(
        lambda: "[all 2 ranks] running" in job.output or job.output.count("] running") == 2,
        "both ranks' first line",
    )
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.await_state("COMPLETED")
    warned = [line for line in job.output.splitlines() if line.endswith("warned")]
    assert warned in (
        ["[all 2 ranks] warned"],
        ["[rank 0] warned", "[rank 1] warned"],
        ["[rank 1] warned", "[rank 0] warned"],
    )
