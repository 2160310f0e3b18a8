"""The grace period of ranks fits into what Slurm or a pod allows."""

import pytest

from torchmuster.launch.schedulers import time_limits
from torchmuster.launch.schedulers.time_limits import POD_VARIABLE

SLURM = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "given", "expected_s"),
    [
        ({}, False, 30.0),  # no scheduler
        (SLURM, False, 25.0),
        (SLURM, True, 30.0),
        ({POD_VARIABLE: "45"}, False, 30.0),
        ({POD_VARIABLE: "20"}, False, 15.0),
        ({POD_VARIABLE: "20"}, True, 15.0),
        ({POD_VARIABLE: "4"}, False, 2.0),
        ({POD_VARIABLE: "a while"}, False, 30.0),
    ],
)
def test_the_grace_period_is_shortened_with_a_margin(
    environment: dict[str, str], given: bool, expected_s: float
) -> None:
    chosen = time_limits.grace_within_limit(30.0, given=given, environment=environment)
    assert chosen.value == expected_s
    assert bool(chosen.reason) == (expected_s < 30.0)


def test_after_a_warning_ranks_have_until_shortly_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits.time, "time", lambda: 1000.0)
    end = {"SLURM_JOB_END_TIME": "1120"}
    assert 100 < time_limits.seconds_to_job_end(end) < 120
    over = {"SLURM_JOB_END_TIME": "999"}
    assert time_limits.seconds_to_job_end(over) > 0
    assert time_limits.seconds_to_job_end({}) > 3600
