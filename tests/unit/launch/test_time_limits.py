"""The grace period of ranks fits into what Slurm or a pod allows."""

from collections.abc import Sequence

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.schedulers import time_limits
from torchmuster.launch.schedulers.slurm.jobs import SlurmAnswer
from torchmuster.launch.schedulers.time_limits import POD_VARIABLE

SLURM = {"SLURM_JOB_ID": "7"}


class Slurm:
    """Answers ``scontrol show config`` with a KillWait; None: scontrol is not installed."""

    def __init__(self, kill_wait_s: int | None) -> None:
        self.kill_wait_s = kill_wait_s
        self.asked: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> SlurmAnswer | None:
        self.asked.append(command)
        if self.kill_wait_s is None:
            return None
        lines = ["JobRequeue              = 1", f"KillWait                = {self.kill_wait_s} sec"]
        return SlurmAnswer(code=0, out="\n".join(lines), err="")


@pytest.mark.parametrize(
    ("environment", "kill_wait_s", "expected_s"),
    [
        ({}, 10, 30.0),  # no scheduler
        (SLURM, 100, 30.0),
        (SLURM, 35, 30.0),
        (SLURM, 30, 25.0),
        (SLURM, None, 25.0),  # Slurm's default is 30 s
        (SLURM, 4, 2.0),
        ({POD_VARIABLE: "45"}, None, 30.0),
        ({POD_VARIABLE: "20"}, None, 15.0),
        ({POD_VARIABLE: "a while"}, None, 30.0),
    ],
)
def test_the_usual_grace_period_is_shortened_with_a_margin(
    environment: dict[str, str], kill_wait_s: int | None, expected_s: float
) -> None:
    slurm = Slurm(kill_wait_s)
    chosen = time_limits.grace_within_limit(30.0, given=False, environment=environment, ask=slurm)
    assert chosen.value == expected_s
    assert bool(chosen.reason) == (expected_s < 30.0)
    assert bool(slurm.asked) == ("SLURM_JOB_ID" in environment)


def test_a_grace_period_that_was_given_is_kept_but_not_without_a_word(
    snapshot: SnapshotAssertion,
) -> None:
    slurm = Slurm(30)
    for grace_s, warned in ((10.0, False), (25.0, False), (120.0, True)):
        chosen = time_limits.grace_within_limit(grace_s, given=True, environment=SLURM, ask=slurm)
        assert (chosen.value, bool(chosen.reason)) == (grace_s, warned)
    assert chosen.reason == snapshot
    usual = time_limits.grace_within_limit(30.0, given=False, environment=SLURM, ask=slurm)
    assert usual.reason == snapshot


def test_after_a_warning_ranks_have_until_shortly_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits.time, "time", lambda: 1000.0)
    end = {"SLURM_JOB_END_TIME": "1120"}
    assert 100 < time_limits.seconds_to_job_end(end) < 120
    over = {"SLURM_JOB_END_TIME": "999"}
    assert time_limits.seconds_to_job_end(over) > 0
    assert time_limits.seconds_to_job_end({}) > 3600
