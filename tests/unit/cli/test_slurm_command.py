"""Commands and Slurm: what a job will run, and that a command inside a job uses its nodes."""

import os
import shlex
from pathlib import Path

import pytest

from muster_command import Muster


@pytest.mark.parametrize(
    ("words", "inside"),
    [
        (["train.py", "--lr", "1e-4"], ["--", "train.py", "--lr", "1e-4"]),
        (["--ranks", "2", "--", "train", "--x"], ["--ranks", "2", "--", "train", "--x"]),
        (["--nodes", "2", "-m", "json.tool"], ["--", "-m", "json.tool"]),
    ],
)
def test_in_the_job_the_same_script_runs_whatever_its_name(
    muster: Muster, own_machine: Path, words: list[str], inside: list[str]
) -> None:
    for name in ("train.py", "train"):
        (own_machine / name).write_text("print('training')\n")
    shown = muster("run", "--slurm", "--dry-run", "--device", "cpu", *words)
    assert shown.code == 0, shown.err
    _, *command = shlex.split(shown.out.splitlines()[-1])
    assert command[1:] == ["-m", "torchmuster", "run", "--device", "cpu", *inside]
    here = muster(*command[3:4], "--dry-run", *command[4:])
    assert here.code == 0, here.err


@pytest.mark.parametrize("words", [["check"], ["run", "train.py"]])
def test_inside_a_job_its_nodes_are_used(
    muster: Muster, own_machine: Path, words: list[str]
) -> None:
    (own_machine / "train.py").touch()
    for name, body in (("srun", "echo srun: error: no >&2; exit 1"), ("scontrol", "exit 1")):
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
    assert "on n1" in result.err
    assert "srun: error: no" in result.err


def test_a_container_is_named_to_the_command_inside_the_job(
    muster: Muster, own_machine: Path
) -> None:
    (own_machine / "train.py").touch()
    given = ["--container-image", "team/train:1", "--container-mounts", "/data/a.py:/a.py"]
    shown = muster("run", "--slurm", "--dry-run", "--nodes", "2", *given, "train.py")
    assert shown.code == 0, shown.err
    _, *command = shlex.split(shown.out.splitlines()[-1])
    assert command[1:] == ["-m", "torchmuster", "run", *given, "--", "train.py"]


@pytest.mark.parametrize("nodes", ["n1", "n[1-2]"])
def test_inside_a_job_srun_starts_the_node_agents_in_the_container(
    muster: Muster, own_machine: Path, nodes: str
) -> None:
    (own_machine / "train.py").touch()
    srun = 'if [ "$1" = --help ]; then echo "  --container-image=IMAGE"; exit; fi; printf "%s\\n" "$@" > argv; exit 1'
    for name, body in (("srun", srun), ("scontrol", "exit 1")):
        (own_machine / name).write_text(f"#!/bin/sh\n{body}\n")
        (own_machine / name).chmod(0o755)
    result = muster(
        *(
            "run",
            "--device",
            "cpu",
            "--ranks",
            "1",
            "--container-image",
            "team/train:1",
            "train.py",
        ),
        env={
            "PATH": f"{own_machine}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": nodes,
            "SLURMD_NODENAME": "n1",
        },
    )
    assert result.code == 1
    words = (own_machine / "argv").read_text().splitlines()
    place = words.index("--container-image=team/train:1")
    assert words[place + 1 : place + 6] == [
        f"--container-mounts={own_machine}:{own_machine}",
        f"--container-workdir={own_machine}",
        *("python3", "-m", "torchmuster.launch.node"),
    ]


@pytest.mark.parametrize(
    "words", [["--container-image", "a"], ["--slurm", "--container-mounts", "/a:/b"]]
)
def test_container_flags_that_have_no_effect_are_refused(
    muster: Muster, own_machine: Path, words: list[str]
) -> None:
    (own_machine / "train.py").touch()
    result = muster("run", *words, "train.py")
    assert result.code == 2
    assert "--container-image" in result.err
