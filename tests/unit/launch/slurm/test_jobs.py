"""Slurm's words for a job's state, in plain words."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.schedulers.slurm.jobs import SlurmAnswer


def text(
    state: str,
    reason: str = "None",
    *,
    restarts: int = 0,
    exit_code: str = "0:0",
    nodes: str = "n[1-2]",
    start: str = "Unknown",
    name: str = "job",
) -> str:
    """What scontrol shows, as measured."""
    return (
        f"JobId=7 JobName={name}\n"
        "   UserId=root(0) GroupId=root(0) MCS_label=N/A\n"
        f"   JobState={state} Reason={reason} Dependency=(null)\n"
        f"   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={exit_code}\n"
        f"   StartTime={start} EndTime=Unknown Deadline=N/A\n"
        "   ReqNodeList=(null) ExcNodeList=(null)\n"
        f"   NodeList={nodes}\n"
        "   BatchHost=n1\n"
        "   StdOut=/home/me/a runs/slurm-7.log\n"
    )


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        pytest.param(text("RUNNING"), "running", id="RUNNING"),
        pytest.param(text("RUNNING", restarts=2), "running", id="RUNNING 2"),
        pytest.param(text("COMPLETING"), "completing", id="COMPLETING"),
        pytest.param(text("COMPLETED"), "done", id="COMPLETED"),
        pytest.param(text("FAILED", exit_code="7:0"), "failed", id="FAILED 7:0"),
        pytest.param(text("FAILED", exit_code="0:9"), "failed", id="FAILED 0:9"),
        pytest.param(text("FAILED", exit_code="0:53"), "failed", id="FAILED 0:53"),
        pytest.param(text("OUT_OF_MEMORY", exit_code="0:125"), "failed", id="OUT_OF_MEMORY 0:125"),
        pytest.param(text("CANCELLED"), "cancelled", id="CANCELLED"),
        pytest.param(text("TIMEOUT"), "timeout", id="TIMEOUT"),
        pytest.param(text("NODE_FAIL"), "node-fail", id="NODE_FAIL"),
        pytest.param(text("PREEMPTED"), "preempted", id="PREEMPTED"),
        pytest.param(text("SUSPENDED"), "suspended", id="SUSPENDED"),
        pytest.param(text("CONFIGURING"), "pending", id="CONFIGURING"),
        pytest.param(
            text("PENDING", "Priority", nodes="(null)", start="2026-01-02T03:04:05"),
            "pending",
            id="PENDING Priority",
        ),
        pytest.param(
            text("PENDING", "QOSMaxGRESPerUser", nodes=""),
            "pending",
            id="PENDING QOSMaxGRESPerUser",
        ),
        pytest.param(
            text("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n[1-2]", nodes=""),
            "pending",
            id="PENDING ReqNodeNotAvail,_UnavailableNodes:n[1-2]",
        ),
        pytest.param(
            text("PENDING", "SomethingNew", nodes=""), "pending", id="PENDING SomethingNew"
        ),
        pytest.param(
            text("PENDING", "BeginTime", nodes="", restarts=1), "requeued", id="PENDING BeginTime 1"
        ),
        pytest.param(text("PENDING", "JobHeldUser", nodes=""), "pending", id="PENDING JobHeldUser"),
        pytest.param(text("QUANTUM"), "unknown", id="QUANTUM"),
    ],
)
def test_states_are_told_in_plain_words(shown: str, kind: str, snapshot: SnapshotAssertion) -> None:
    state = jobs.read_job_states("7", shown)
    assert state.kind == kind
    assert state.words == snapshot


def test_the_numbers_are_kept() -> None:
    state = jobs.read_job_states(
        "7", text("FAILED", "NonZeroExitCode", restarts=3, exit_code="5:0")
    )
    assert (state.exit_code, state.signal, state.restarts) == (5, None, 3)
    assert state.log == Path("/home/me/a runs/slurm-7.log")
    assert jobs.read_job_states("7", text("RUNNING")).exit_code is None


def test_a_jobs_name_cannot_say_that_it_is_done() -> None:
    shown = text("RUNNING", name="x JobState=COMPLETED Reason=None ExitCode=0:0 NodeList=evil")
    assert jobs.read_job_states("7", shown) == jobs.read_job_states("7", text("RUNNING"))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (
            SlurmAnswer(code=1, out="", err="slurm_load_jobs error: Invalid job id specified"),
            "gone",
        ),
        (
            SlurmAnswer(
                code=1, out="", err="slurm_load_jobs error: Unable to contact slurm controller"
            ),
            "unknown",
        ),
        (None, "unknown"),
    ],
    ids=["not known", "no controller", "no scontrol"],
)
def test_no_answer_is_not_an_end(
    answer: SlurmAnswer | None, kind: str, snapshot: SnapshotAssertion
) -> None:
    def ask(command: Sequence[str]) -> SlurmAnswer | None:
        assert command == ["scontrol", "show", "job", "7"]
        return answer

    state = jobs.poll_job("7", ask)
    assert state.kind == kind
    assert state.words == snapshot
    assert state.final == (kind == "gone")
