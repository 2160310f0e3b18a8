"""The state of a job in squeue's words, and its log while it grows."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.schedulers.slurm.jobs import JobState, SlurmAnswer, follow_job, job_state


@pytest.mark.parametrize(
    ("text", "ended", "completed"),
    [
        ("PENDING Resources", False, False),
        ("RUNNING None node[1-3]", False, False),
        ("COMPLETING None node1", False, False),
        ("COMPLETED None node1", True, True),
        ("FAILED NonZeroExitCode node1", True, False),
        ("CANCELLED None", True, False),
        ("", True, False),
    ],
)
def test_whether_a_job_is_over(text: str, ended: bool, completed: bool) -> None:
    state = JobState(text=text)
    assert (state.ended, state.completed) == (ended, completed)


def test_a_controller_that_does_not_answer_is_no_end() -> None:
    error = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    assert job_state("7", lambda _: SlurmAnswer(code=1, out="", err=error)) is None
    unknown = "slurm_load_jobs error: Invalid job id specified"
    state = job_state("7", lambda _: SlurmAnswer(code=1, out="", err=unknown))
    assert state == JobState(text="")


def test_a_job_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(jobs, "_READ_EVERY_S", 0.0)
    log = tmp_path / "slurm-7.log"
    answers = [
        ("PENDING Resources ", b""),
        ("PENDING Resources ", b""),
        ("RUNNING None n1", b"first\nsec"),
        ("RUNNING None n1", b"ond \xc3"),
        ("COMPLETED None n1", b"\xa4\n"),
    ]

    def squeue(command: Sequence[str]) -> SlurmAnswer:
        assert "--jobs=7" in command
        text, output = answers.pop(0)
        if output:
            with log.open("ab") as stream:
                stream.write(output)
        return SlurmAnswer(code=0, out=f"{text}\n", err="")

    assert list(follow_job("7", log, squeue)) == [
        JobState(text="PENDING Resources"),
        JobState(text="RUNNING None n1"),
        "first\nsec",
        "ond ",
        JobState(text="COMPLETED None n1"),
        "ä\n",
    ]
