"""The sbatch command: every word as it was typed."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import Impossible
from torchmuster.launch.job import Host, JobSpec
from torchmuster.launch.schedulers.slurm.submit import sbatch_command

MUSTER = ["/opt/venv/bin/python", "-m", "torchmuster", "run"]


def spec(**changes: Any) -> JobSpec:
    given: dict[str, Any] = {
        "name": "pretrain",
        "command": ("train.py",),
        "folder": "/home/me/work",
    }
    return JobSpec(**{**given, **changes})


def sbatch(
    job: JobSpec,
    command: Sequence[str] = MUSTER,
    run_root: str = "runs",
    *,
    no_kill: bool = False,
    arguments: Sequence[str] = (),
) -> list[str]:
    return sbatch_command(
        job, command, Path(run_root), nodes=4, no_kill=no_kill, sbatch_arguments=arguments
    )


def test_the_command_of_a_job() -> None:
    words = sbatch(spec(), [*MUSTER, "train.py"], no_kill=True, arguments=["-p", "a100"])
    assert words == [
        "sbatch",
        "--parsable",
        "--job-name=pretrain",
        "--chdir=/home/me/work",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--output=/home/me/work/runs/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        "--export=ALL",
        "--no-kill",
        *("-p", "a100"),  # they take precedence
        "--wrap=exec /opt/venv/bin/python -m torchmuster run train.py",
    ]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_every_word_arrives_as_it_was_typed(words: list[str]) -> None:
    _, _, command = sbatch(spec(), [*MUSTER, *words])[-1].partition("--wrap=exec ")
    assert shlex.split(command) == [*MUSTER, *words]


def test_runs_elsewhere_have_their_log_there() -> None:
    assert "--output=/scratch/100%%/slurm-%j.log" in sbatch(spec(), run_root="/scratch/100%")


def test_hosts_are_chosen_by_slurm() -> None:
    with pytest.raises(Impossible, match="--hosts and --slurm"):
        sbatch(spec(hosts=(Host(name="a"),)))
