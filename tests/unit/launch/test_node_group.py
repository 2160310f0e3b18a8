"""A node finds its group in the environment; every mistake in it is named."""

import re
from pathlib import Path

import pytest

from torchmuster.cli import schedulers
from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.node_group import NodeGroup, group_here
from torchmuster.launch.transports.local import LocalTransport

WHOLE = {
    "TORCHMUSTER_NNODES": "4",
    "TORCHMUSTER_NODE_RANK": "3",
    "TORCHMUSTER_LAUNCHER": "train-0.train:1234",
    "TORCHMUSTER_JOIN_SECRET": "0123456789abcdef",
    "TORCHMUSTER_RUN_ID": "train",
    "TORCHMUSTER_JOB_UID": "u-1",
}


def test_the_environment_describes_a_group() -> None:
    assert group_here(WHOLE) == NodeGroup(
        nodes=4,
        node_rank=3,
        launcher="train-0.train",
        port=1234,
        secret="0123456789abcdef",
        run_id="train",
        job_uid="u-1",
    )
    assert "0123456789abcdef" not in repr(group_here(WHOLE))
    assert group_here({"HOME": "/"}) is None


def test_a_single_node_needs_neither_an_address_nor_a_secret() -> None:
    group = group_here({"TORCHMUSTER_NNODES": "1", "TORCHMUSTER_NODE_RANK": "0"})
    assert group is not None
    assert (group.nodes, group.node_rank) == (1, 0)
    assert group.secret is None


def test_a_single_node_listens_on_no_port() -> None:
    """Also where the scheduler describes an address, as for one pod of a Job with a Service."""
    for name in ("TORCHMUSTER_LAUNCHER", "TORCHMUSTER_JOIN_SECRET"):
        one_of_four = {**WHOLE, "TORCHMUSTER_NNODES": "1", "TORCHMUSTER_NODE_RANK": "0"}
        environment = {key: value for key, value in one_of_four.items() if key != name}
        group = group_here(environment)
        assert group is not None
        assert isinstance(schedulers.transport_to_group(group), LocalTransport)


@pytest.mark.parametrize(
    "wrong",
    [
        {"TORCHMUSTER_NNODES": ""},
        {"TORCHMUSTER_NNODES": "0"},
        {"TORCHMUSTER_NODE_RANK": "$(JOB_COMPLETION_INDEX)"},
        {"TORCHMUSTER_NODE_RANK": "4"},
        {"TORCHMUSTER_LAUNCHER": ""},
        {"TORCHMUSTER_LAUNCHER": "train-0.train:0"},
        {"TORCHMUSTER_LAUNCHER": "-oProxyCommand=x"},
        {"TORCHMUSTER_JOIN_SECRET": ""},
        {"TORCHMUSTER_JOIN_SECRET": "short"},
        {"TORCHMUSTER_RUN_ID": "../elsewhere"},
        {"TORCHMUSTER_RUN_ID": "a" * 65},
    ],
    ids=lambda wrong: re.sub(r"\W+", "-", str(wrong))[:60],
)
def test_a_mistake_is_named(wrong: dict[str, str]) -> None:
    with pytest.raises(Impossible) as caught:
        group_here({**WHOLE, **wrong})
    (name,) = wrong
    assert name in caught.value.why
    assert "0123456789abcdef" not in str(caught.value)


def group(uid: str = "u-1") -> NodeGroup:
    found = group_here({**WHOLE, "TORCHMUSTER_JOB_UID": uid})
    assert found is not None
    return found


def test_the_run_folder_has_the_given_id_and_is_found_again(tmp_path: Path) -> None:
    assert group().earlier_run(tmp_path) is None
    run = group().run_folder(tmp_path, "name")
    assert run.path == tmp_path / "train"
    assert group().earlier_run(tmp_path) == group().run_folder(tmp_path, "name") == run


def test_a_folder_that_a_killed_launcher_left_incomplete_is_completed(tmp_path: Path) -> None:
    (tmp_path / "train" / "logs").mkdir(parents=True)
    assert group().earlier_run(tmp_path) is None
    assert group().run_folder(tmp_path, "name").marker.is_file()


@pytest.mark.parametrize(
    ("exit_code", "uid", "ended"),
    [
        (0, "u-1", 0),
        (1, "u-1", 1),
        (75, "u-1", None),
        (137, "u-1", None),
        (143, "u-1", None),
        (1, "u-2", None),
    ],
)
def test_a_run_that_is_over_is_not_repeated_for_the_same_job(
    tmp_path: Path, exit_code: int, uid: str, ended: int | None
) -> None:
    run = group().run_folder(tmp_path, "name")
    run_state.write_job(run, JobSpec(name="name", command=("train.py",), folder="/", job_uid="u-1"))
    log = run_state.EventLog(run)
    log.phase("running")
    assert group(uid).ended(tmp_path) is None
    log.ended("stopped", exit_code, "as it happened")
    assert group(uid).ended(tmp_path) == ended


def test_the_end_is_recorded_once(tmp_path: Path) -> None:
    run = group().run_folder(tmp_path, "name")
    log = run_state.EventLog(run)
    log.phase(run_state.FINISHED)  # before the other nodes are released
    log.ended(run_state.FINISHED, 0, "finished")
    assert [event.name for event in run_state.read_events(run)] == ["launched", "finished"]


def test_nodes_of_another_job_have_other_keys() -> None:
    assert group().key() == group().key() != group("u-2").key()


def test_the_folder_of_another_job_is_continued_only_if_that_is_over(tmp_path: Path) -> None:
    run = group().run_folder(tmp_path, "name")
    spec = JobSpec(name="name", command=("train.py", "--lr", "1"), folder="/", job_uid="u-1")
    run_state.write_job(run, spec)
    log = run_state.EventLog(run)
    log.phase("running")
    with pytest.raises(NotNow) as caught:
        schedulers.folder_of_group(group("u-2"), tmp_path, spec)
    assert "active in another job" in caught.value.what
    assert schedulers.folder_of_group(group(), tmp_path, spec) == run  # its launcher was replaced
    log.ended("stopped", 143, "stopped on request")
    assert schedulers.folder_of_group(group("u-2"), tmp_path, spec) == run
