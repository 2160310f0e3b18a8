"""What an allocation is, from Slurm's texts and variables; and what it cannot give."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import Host, JobSpec
from torchmuster.launch.schedulers.slurm.allocation import (
    Allocation,
    allocation_here,
    check_counts,
)
from torchmuster.launch.schedulers.slurm.jobs import SlurmAnswer

JOB = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1-2]"}


def no_scontrol(command: Sequence[str]) -> SlurmAnswer | None:
    return None


def scontrol(command: Sequence[str]) -> SlurmAnswer:
    assert command == ["scontrol", "show", "hostnames", "n[1-2]"]
    return SlurmAnswer(code=0, out="n1\nn2\n", err="")


def allocation(**changes: Any) -> Allocation:
    usual: dict[str, Any] = {
        "job": "41",
        "nodes": ("n1", "n2"),
        "gpus_per_node": 4,
        "tasks_per_node": 1,
        "copies": 1,
        "restarts": 0,
    }
    return Allocation(**{**usual, **changes})


def spec(**changes: Any) -> JobSpec:
    return JobSpec(name="j", command=("t.py",), folder="/", **changes)


def test_outside_of_slurm_there_is_no_allocation() -> None:
    assert allocation_here({}, no_scontrol) is None
    assert allocation_here({"SLURM_JOB_ID": "41"}, no_scontrol) is None
    assert allocation_here({"SLURM_JOB_ID": "no", "SLURM_JOB_NODELIST": "n1"}, no_scontrol) is None


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, 3),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "5"}, None),
        ({}, None),
    ],
)
def test_the_gpus_come_from_the_variables(variables: Mapping[str, str], gpus: int | None) -> None:
    here = allocation_here({**JOB, **variables}, scontrol)
    assert here is not None
    assert (here.nodes, here.gpus_per_node) == (("n1", "n2"), gpus)


def test_one_node_needs_no_scontrol_and_several_say_so() -> None:
    alone = allocation_here({"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n1"}, no_scontrol)
    assert alone is not None
    assert alone.nodes == ("n1",)
    with pytest.raises(Impossible) as caught:
        allocation_here(JOB, no_scontrol)
    assert "mount Slurm's programs" in caught.value.fix


def test_the_rest_comes_from_the_variables() -> None:
    variables = {
        "SLURM_NTASKS": "8",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_STEP_NUM_TASKS": "8",
    }
    found = allocation_here({**JOB, **variables}, scontrol)
    assert found == allocation(gpus_per_node=None, tasks_per_node=4, copies=8, restarts=2)


def test_what_fits_is_let_through() -> None:
    check_counts(allocation(), spec())
    check_counts(allocation(), spec(ranks=4))
    check_counts(allocation(), spec(ranks=2))
    check_counts(allocation(tasks_per_node=4), spec())
    check_counts(allocation(gpus_per_node=None), spec(device="cpu", ranks=7))
    check_counts(allocation(gpus_per_node=None), spec(ranks=7))  # the nodes themselves will say
    check_counts(allocation(), spec(ranks=8, share=True))


@pytest.mark.parametrize(
    ("has", "asked", "fix"),
    [
        pytest.param({}, {"hosts": (Host(name="a"),)}, "--hosts", id="hosts"),
        pytest.param({"copies": 2}, {}, "srun", id="copies"),
        pytest.param({}, {"ranks": 8}, "sbatch --gpus-per-node=8", id="too many ranks"),
        pytest.param({"tasks_per_node": 8}, {"ranks": 4}, "--ranks 8", id="8 tasks per node"),
        pytest.param({"tasks_per_node": 2}, {}, "--ranks 2", id="2 tasks per node"),
    ],
)
def test_counts_that_do_not_fit_are_refused_in_one_sentence(
    has: dict[str, Any], asked: dict[str, Any], fix: str
) -> None:
    with pytest.raises(Impossible) as caught:
        check_counts(allocation(**has), spec(**asked))
    assert fix in caught.value.fix
    assert caught.value.exit_code == ExitCode.IMPOSSIBLE
