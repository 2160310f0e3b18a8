"""Slurm's words for a job's state, in plain words."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from torchmuster.launch.slurm import jobs
from torchmuster.launch.slurm.clients import Answer


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
    ("shown", "kind", "words"),
    [
        (text("RUNNING"), "running", "job 7 runs on n[1-2]"),
        (text("RUNNING", restarts=2), "running", "job 7 runs on n[1-2] (start 3)"),
        (text("COMPLETING"), "completing", "job 7 is ending on n[1-2]"),
        (text("COMPLETED"), "done", "job 7 ended well on n[1-2]"),
        (text("FAILED", exit_code="7:0"), "failed", "job 7 failed on n[1-2]: exit code 7"),
        (text("FAILED", exit_code="0:9"), "failed", "job 7 failed on n[1-2]: signal 9 ended it"),
        (
            text("FAILED", exit_code="0:53"),
            "failed",
            "job 7 failed on n[1-2]: Slurm could not open its log /home/me/a runs/slurm-7.log on the"
            " node; is the folder there?",
        ),
        (
            text("OUT_OF_MEMORY", exit_code="0:125"),
            "failed",
            "job 7 failed on n[1-2]: a node ran out of the memory that the job may use",
        ),
        (text("CANCELLED"), "cancelled", "job 7 was cancelled on n[1-2]"),
        (text("TIMEOUT"), "timeout", "job 7 was ended on n[1-2]: its time limit was reached"),
        (text("NODE_FAIL"), "node-fail", "job 7 was ended on n[1-2]: a node failed"),
        (
            text("PREEMPTED"),
            "preempted",
            "job 7 was ended on n[1-2]: a job of more weight took its nodes",
        ),
        (text("SUSPENDED"), "suspended", "job 7 is suspended on n[1-2]"),
        (text("CONFIGURING"), "pending", "job 7 waits: its nodes are being started"),
        (
            text("PENDING", "Priority", nodes="(null)", start="2026-01-02T03:04:05"),
            "pending",
            "job 7 waits: waiting behind jobs of higher priority (Priority);"
            " Slurm expects 2026-01-02T03:04:05",
        ),
        (
            text("PENDING", "QOSMaxGRESPerUser", nodes=""),
            "pending",
            "job 7 waits: you already use as many GPUs as your QOS allows (QOSMaxGRESPerUser)",
        ),
        (
            text("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n[1-2]", nodes=""),
            "pending",
            "job 7 waits: a node that it needs is down, drained, or reserved (perhaps for"
            " maintenance) (ReqNodeNotAvail)",
        ),
        (
            text("PENDING", "SomethingNew", nodes=""),
            "pending",
            "job 7 waits: Slurm gives the reason SomethingNew",
        ),
        (
            text("PENDING", "BeginTime", nodes="", restarts=1),
            "requeued",
            "job 7 was put back into the queue (once so far) and waits: its earliest start time has"
            " not come yet (after a requeue that takes some minutes) (BeginTime)",
        ),
        (
            text("PENDING", "JobHeldUser", nodes=""),
            "pending",
            "job 7 will not start by itself: it is held by its owner; scontrol release lets it go"
            " (JobHeldUser)",
        ),
        (text("QUANTUM"), "unknown", "job 7 is quantum on n[1-2]"),
    ],
)
def test_states_are_told_in_plain_words(shown: str, kind: str, words: str) -> None:
    state = jobs.read("7", shown)
    assert (state.kind, state.words) == (kind, words)


def test_the_numbers_are_kept() -> None:
    state = jobs.read("7", text("FAILED", "NonZeroExitCode", restarts=3, exit_code="5:0"))
    assert (state.exit_code, state.signal, state.restarts) == (5, None, 3)
    assert state.log == Path("/home/me/a runs/slurm-7.log")
    assert jobs.read("7", text("RUNNING")).exit_code is None


def test_a_jobs_name_cannot_say_that_it_is_done() -> None:
    shown = text("RUNNING", name="x JobState=COMPLETED Reason=None ExitCode=0:0 NodeList=evil")
    assert jobs.read("7", shown) == jobs.read("7", text("RUNNING"))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            Answer(code=1, out="", err="slurm_load_jobs error: Invalid job id specified"),
            "gone",
            "Slurm does not know job 7, or no longer",
        ),
        (
            Answer(code=1, out="", err="slurm_load_jobs error: Unable to contact slurm controller"),
            "unknown",
            "Slurm does not answer: slurm_load_jobs error: Unable to contact",
        ),
        (None, "unknown", "scontrol is not on this machine"),
    ],
)
def test_no_answer_is_not_an_end(answer: Answer | None, kind: str, words: str) -> None:
    def ask(command: Sequence[str]) -> Answer | None:
        assert command == ["scontrol", "show", "job", "7"]
        return answer

    state = jobs.poll("7", ask)
    assert state.kind == kind
    assert words in state.words
    assert state.final == (kind == "gone")
