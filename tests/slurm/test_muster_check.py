"""``muster check`` as a Slurm job: submitted, made on all nodes of the job."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from muster_command import muster_argv
from patience import GIVE_UP_S
from slurm.slurm_lab import SlurmLab, SubmittedJob

pytestmark = pytest.mark.nightly


def test_a_job_checks_all_its_nodes(cluster: SlurmLab, tmp_path: Path) -> None:
    words = ["check", "--slurm", "--nodes", "2", "--device", "cpu", "--ranks", "1"]
    done = subprocess.run(
        muster_argv(words),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stdout
    number = re.findall(r"\d+", done.stdout)[0]
    job = SubmittedJob(number=number, log=tmp_path / "runs" / f"slurm-{number}.log")
    assert job.await_end().startswith("COMPLETED"), job.output
    assert "2 of 2 joined" in job.output
    assert "all 2 hosts pass" in job.output
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/check.json"))
    assert len(result["machines"]) == len(result["ranks"]) == 2
