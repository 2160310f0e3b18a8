"""A job goes back into the queue by itself, if it may; else it says what to do."""

from collections.abc import Sequence

import pytest

from torchmuster.launch import saved
from torchmuster.launch.slurm.clients import Answer
from torchmuster.launch.slurm.requeue import may_go_back, requeue, would_not_get_on
from torchmuster.launch.spec import JobSpec


class Slurm:
    """Answers as scontrol does."""

    def __init__(self, shown: Answer | None, requeued: Answer | None = None) -> None:
        self._answers = {"show": shown, "requeue": requeued}
        self.asked: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> Answer | None:
        self.asked.append(command)
        return self._answers[command[1]]


MAY = Answer(code=0, out="JobId=7 JobName=train\n   Requeue=1 Restarts=0 BatchFlag=1\n", err="")
MAY_NOT = Answer(code=0, out="JobId=7 JobName=train\n   Requeue=0 Restarts=0\n", err="")
GOOD = Answer(code=0, out="", err="")


def test_a_job_that_may_is_put_back() -> None:
    slurm = Slurm(MAY, GOOD)
    chosen = may_go_back("7", slurm)
    assert chosen.value
    assert chosen.reason == "job 7 goes back into the queue, and goes on when it starts"
    assert slurm.asked == [["scontrol", "show", "job", "7"]], (
        "said before Slurm ends the job for it"
    )
    assert requeue("7", slurm) == ""
    assert slurm.asked[1:] == [["scontrol", "requeue", "7"]]


@pytest.mark.parametrize(
    ("slurm", "reason"),
    [
        (
            Slurm(MAY_NOT),
            "job 7 may not go back into the queue (Requeue=0); submit it again to go on",
        ),
        (
            Slurm(None),
            "Slurm does not tell of job 7 (scontrol is not on this machine); put it back into the"
            " queue by hand: scontrol requeue 7",
        ),
    ],
)
def test_one_that_may_not_says_what_to_do(slurm: Slurm, reason: str) -> None:
    chosen = may_go_back("7", slurm)
    assert not chosen.value
    assert chosen.reason == reason


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Answer(code=1, out="", err="Access/permission denied for job 7"),
            "Access/permission denied for job 7",
        ),
        (None, "scontrol is gone"),
    ],
)
def test_one_that_slurm_does_not_take_back_says_so(answer: Answer | None, said: str) -> None:
    assert requeue("7", Slurm(MAY, answer)) == f"job 7 stays out of the queue: {said}"


def test_one_that_does_not_get_on_does_not_go_round_for_ever() -> None:
    slurm = Slurm(MAY, GOOD)
    chosen = may_go_back("7", slurm, why_not="it would not get on")
    assert not chosen.value
    assert chosen.reason == "job 7 stays out of the queue: it would not get on"
    assert slurm.asked == []


AT_ONCE = (
    "it ended with exit code 75 by itself after 3 s, without a warning, and might do so for ever"
)
NOTHING_NEW = "it saved nothing new in all of its time, and would not get on; give it more: --time"


@pytest.mark.parametrize(
    ("checkpoints", "words", "is_newer", "warned", "took_s", "why_not"),
    [
        (None, "saved", False, False, 3.0, AT_ONCE),
        (None, "saved", False, True, 3.0, ""),
        (None, "saved", False, False, 3600.0, ""),
        ("runs/x", saved.NOTHING_NEW, False, True, 3600.0, NOTHING_NEW),
        ("runs/x", saved.NOTHING_NEW, True, True, 3600.0, ""),
        ("runs/x", "saved at step 9", False, False, 3.0, ""),
    ],
)
def test_only_who_gets_on_goes_back_into_the_queue(
    checkpoints: str | None, words: str, is_newer: bool, warned: bool, took_s: float, why_not: str
) -> None:
    spec = JobSpec(name="x", command=("x.py",), folder="/", checkpoints=checkpoints)
    found = would_not_get_on(spec, words, is_newer=is_newer, warned=warned, took_s=took_s)
    assert found == why_not
