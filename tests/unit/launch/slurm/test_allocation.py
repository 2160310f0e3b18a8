"""What an allocation is, from Slurm's texts and variables; and what it cannot give."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import Host, JobSpec
from torchmuster.launch.schedulers.slurm.allocation import (
    Allocation,
    allocation_here,
    check_counts,
    expand_hostlist,
    few_cores,
    gpus_by_node,
)
from torchmuster.launch.schedulers.slurm.jobs import SlurmAnswer

JOB = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1-2]"}


def no_scontrol(command: Sequence[str]) -> SlurmAnswer | None:
    return None


def allocation(**changes: Any) -> Allocation:
    usual: dict[str, Any] = {
        "job": "41",
        "nodes": ("n1", "n2"),
        "gpus": (4, 4),
        "cores": 16,
        "tasks_per_node": 1,
        "copies": 1,
        "restarts": 0,
    }
    return Allocation(**{**usual, **changes})


def spec(**changes: Any) -> JobSpec:
    return JobSpec(name="j", command=("t.py",), folder="/", **changes)


@pytest.mark.parametrize(
    ("node_list", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010,12]", ["n008", "n009", "n010", "n12"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("b[2,1],a", ["b2", "b1", "a"]),
    ],
)
def test_node_lists_are_written_out(node_list: str, names: list[str]) -> None:
    assert list(expand_hostlist(node_list)) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n[a-b]", "n[]", "n]1[", "n[1-999999999]", ",", "n[1-2-3]"]
)
def test_what_is_no_node_list_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="node"):
        expand_hostlist(text)


@given(st.text(alphabet="n1[]-,", max_size=12))
def test_any_text_is_a_node_list_or_an_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert all("[" not in name and "," not in name for name in expand_hostlist(text))


def test_outside_of_slurm_there_is_no_allocation() -> None:
    assert allocation_here({}, no_scontrol) is None
    assert allocation_here({"SLURM_JOB_ID": "41"}, no_scontrol) is None
    assert allocation_here({"SLURM_JOB_ID": "no", "SLURM_JOB_NODELIST": "n1"}, no_scontrol) is None


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, (4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, (3, 3)),
        ({"SLURM_GPUS_ON_NODE": "4"}, (4, 4)),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "5"}, None),
        ({"SLURM_JOB_GPUS": "0,1,2"}, (3, 3)),
        ({"SLURM_STEP_GPUS": "5"}, (1, 1)),
        ({}, None),
    ],
)
def test_without_scontrol_the_variables_have_to_do(
    variables: Mapping[str, str], gpus: tuple[int, ...] | None
) -> None:
    found = allocation_here({**JOB, **variables}, no_scontrol)
    assert found is not None
    assert found.nodes == ("n1", "n2")
    assert found.gpus == gpus


def test_scontrol_knows_better_than_the_variables() -> None:
    def scontrol(command: Sequence[str]) -> SlurmAnswer:
        if command[:3] == ["scontrol", "show", "hostnames"]:
            return SlurmAnswer(code=0, out="n1\nn2\n", err="")
        assert command == ["scontrol", "show", "-d", "job", "41"]
        text = "JobId=41\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a100:4(IDX:0-3)\n"
        return SlurmAnswer(
            code=0, out=text + "     Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)\n", err=""
        )

    found = allocation_here({**JOB, "SLURM_GPUS_ON_NODE": "4"}, scontrol)
    assert found is not None
    assert found.gpus == (4, 1)
    assert found.gpus_per_node is None


def test_the_rest_comes_from_the_variables() -> None:
    variables = {
        "SLURM_NTASKS": "8",
        "SLURM_CPUS_ON_NODE": "16",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_STEP_NUM_TASKS": "8",
    }
    found = allocation_here({**JOB, **variables}, no_scontrol)
    assert found == allocation(gpus=None, tasks_per_node=4, copies=8, restarts=2)


def test_the_gpus_of_an_array_task_are_not_those_of_the_other_tasks() -> None:
    asked: list[Sequence[str]] = []

    def scontrol(command: Sequence[str]) -> None:
        asked.append(command)

    task = {**JOB, "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3"}
    assert allocation_here(task, scontrol) is not None
    assert ["scontrol", "show", "-d", "job", "41_3"] in asked


def test_a_broken_node_list_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as caught:
        allocation_here({"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1-"}, no_scontrol)
    assert caught.value.what == snapshot


def test_gpus_are_read_per_node() -> None:
    text = (
        "   JOB_GRES=gpu:12\n"
        "     Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0,3),gpu:h100:1(IDX:5),nic:1(IDX:0)\n"
        "     Nodes=n3 CPU_IDs=0 Mem=0 GRES=\n"
        "     Nodes=n4 CPU_IDs=0 Mem=0 GRES=gpu:8(IDX:0-7)\n"
    )
    assert gpus_by_node(text) == {"n1": 3, "n2": 3, "n3": 0, "n4": 8}


def test_what_fits_is_let_through() -> None:
    check_counts(allocation(), spec())
    check_counts(allocation(), spec(ranks=4))
    check_counts(allocation(), spec(ranks=2))
    check_counts(allocation(tasks_per_node=4), spec())
    check_counts(allocation(gpus=None), spec(device="cpu", ranks=7))
    check_counts(allocation(gpus=None), spec(ranks=7))  # the nodes themselves will say
    check_counts(allocation(gpus=(4, 1)), spec(device="cpu", ranks=2))
    check_counts(allocation(), spec(ranks=8, share=True))


@pytest.mark.parametrize(
    ("has", "asked", "fix"),
    [
        pytest.param({}, {"hosts": (Host(name="a"),)}, "--hosts", id="hosts"),
        pytest.param({"copies": 2}, {}, "srun", id="copies"),
        pytest.param({}, {"ranks": 8}, "sbatch --gpus-per-node=8", id="too many ranks"),
        pytest.param(
            {"gpus": (4, 1)}, {}, "sbatch --nodes=2 --gpus-per-node=4", id="different nodes"
        ),
        pytest.param({"tasks_per_node": 8}, {"ranks": 4}, "--ranks 8", id="8 tasks per node"),
        pytest.param({"tasks_per_node": 2}, {}, "--ranks 2", id="2 tasks per node"),
    ],
)
def test_counts_that_do_not_fit_are_refused_in_one_sentence(
    has: dict[str, Any], asked: dict[str, Any], fix: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as caught:
        check_counts(allocation(**has), spec(**asked))
    assert fix in caught.value.fix
    assert str(caught.value) == snapshot
    assert caught.value.exit_code == ExitCode.IMPOSSIBLE


def test_a_single_core_for_many_ranks_is_warned_of(snapshot: SnapshotAssertion) -> None:
    finding = few_cores(allocation(cores=1), spec())
    assert finding is not None
    assert finding.name == "few-cores"
    assert finding.what == snapshot
    assert finding.fix.startswith("sbatch --cpus-per-task=16")
    assert few_cores(allocation(cores=4), spec()) is None
    assert few_cores(allocation(cores=None), spec()) is None
