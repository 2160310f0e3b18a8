"""Commands and Slurm: what a job will run, and that a command inside a job uses its nodes."""

import os
import shlex
from pathlib import Path

import pytest

from muster_command import Muster

pytestmark = pytest.mark.slow


def command_in_the_job(shown: str) -> list[str]:
    """Return what the job runs, of the sbatch command that --dry-run printed."""
    *_, last = shlex.split(shown)
    return shlex.split(last.removeprefix("--wrap=exec "))


@pytest.mark.parametrize(
    ("words", "inside"),
    [
        (["train.py", "--lr", "1e-4"], ["train.py", "--lr", "1e-4"]),
        (["--ranks", "2", "--", "train", "--x"], ["--ranks=2", "train", "--x"]),
        (["--nodes", "1", "-m", "json.tool"], ["--nodes=1", "-m", "json.tool"]),
    ],
)
def test_in_the_job_the_same_script_runs_whatever_its_name(
    muster: Muster, own_machine: Path, words: list[str], inside: list[str]
) -> None:
    for name in ("train.py", "train"):
        (own_machine / name).write_text("print('training')\n")
    shown = muster("run", "--slurm", "--dry-run", "--device", "cpu", *words)
    assert shown.code == 0, shown.err
    command = command_in_the_job(shown.out)
    assert command[1:] == ["-m", "torchmuster", "run", "--slurm", "--device=cpu", *inside]
    env = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    here = muster(*command[3:4], "--dry-run", *command[4:], env=env)
    assert here.code == 0, here.err


@pytest.mark.parametrize("words", [["check"], ["run", "train.py"]])
def test_inside_a_job_its_nodes_are_used(
    muster: Muster, own_machine: Path, words: list[str]
) -> None:
    (own_machine / "train.py").touch()
    for name, body in (
        ("srun", "echo srun: error: no >&2; exit 1"),
        ("scontrol", "echo n1; echo n2"),
    ):
        (own_machine / name).write_text(f"#!/bin/sh\n{body}\n")
        (own_machine / name).chmod(0o755)
    result = muster(
        words[0],
        *("--device", "cpu", "--ranks", "1", *words[1:]),
        env={
            "PATH": f"{own_machine}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "n[1-2]",
        },
    )
    assert result.code == 1
    assert "Slurm job 41 with 2 nodes" in result.err
    assert "n1 missing" in result.err or "on n1" in result.err
    assert "srun: error: no" in result.err


def test_arguments_of_sbatch_are_those_of_the_job(muster: Muster, own_machine: Path) -> None:
    (own_machine / "train.py").touch()
    arguments = "--partition=gpu -C 'a b' --signal=B:USR1@300"
    shown = muster("run", "--slurm", "--dry-run", "--sbatch", arguments, "train.py")
    assert shown.code == 0, shown.err
    assert "--partition=gpu -C 'a b' --signal=B:USR1@300 '--wrap=" in shown.out
    command = command_in_the_job(shown.out)
    assert command[1:5] == ["-m", "torchmuster", "run", "--slurm"]
    assert command[6:] == ["train.py"]


@pytest.mark.parametrize("arguments", [["--sbatch", "-p gpu"], ["--slurm", "--sbatch", "-p 'gpu"]])
def test_arguments_of_sbatch_that_mean_nothing_are_refused(
    muster: Muster, own_machine: Path, arguments: list[str]
) -> None:
    (own_machine / "train.py").touch()
    result = muster("run", *arguments, "train.py")
    assert result.code == 2
    assert "--sbatch" in result.err
