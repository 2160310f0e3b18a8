"""A job goes back into the queue by itself, if it may; else it says what to do."""

from collections.abc import Sequence

import pytest

from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm.allocation import (
    job_id,
    requeue,
    would_not_get_on,
)
from torchmuster.launch.schedulers.slurm.jobs import SlurmAnswer


class Slurm:
    """Answers as scontrol does."""

    def __init__(self, answer: SlurmAnswer | None) -> None:
        self._answer = answer
        self.asked: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> SlurmAnswer | None:
        self.asked.append(command)
        return self._answer


def test_a_job_is_put_back() -> None:
    slurm = Slurm(SlurmAnswer(code=0, out="", err=""))
    assert requeue("7", slurm) is None
    assert slurm.asked == [["scontrol", "requeue", "7"]]


def test_one_that_slurm_does_not_take_back_says_so() -> None:
    refused = SlurmAnswer(code=1, out="", err="Access/permission denied for job 7")
    assert requeue("7", Slurm(refused)) == refused.err


def test_without_scontrol_it_says_where_to_requeue() -> None:
    assert "in the job script" in (requeue("9", Slurm(None)) or "")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        # The job ID of this task is also that of the array.
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2"),
        ({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "8"),
    ],
)
def test_a_task_of_an_array_is_never_addressed_as_the_array(
    variables: dict[str, str], found: str | None
) -> None:
    assert job_id(variables) == found


@pytest.mark.parametrize(
    ("checkpoints", "saved_new", "is_newer", "warned", "took_s", "goes_back"),
    [
        (None, True, False, False, 3.0, False),
        (None, True, False, True, 3.0, True),
        (None, True, False, False, 3600.0, True),
        ("runs/x", False, False, True, 3600.0, False),
        ("runs/x", False, True, True, 3600.0, True),
        ("runs/x", True, False, False, 3.0, True),
    ],
    ids=["ended at once", "warned", "took long", "nothing new", "newer before", "saved"],
)
def test_only_who_gets_on_goes_back_into_the_queue(
    checkpoints: str | None,
    saved_new: bool,
    is_newer: bool,
    warned: bool,
    took_s: float,
    goes_back: bool,
) -> None:
    spec = JobSpec(name="x", command=("x.py",), folder="/", checkpoints=checkpoints)
    found = would_not_get_on(
        spec, saved_new=saved_new, is_newer=is_newer, warned=warned, took_s=took_s
    )
    assert (found is None) is goes_back
