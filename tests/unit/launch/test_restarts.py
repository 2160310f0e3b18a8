"""When a run that failed is started again, after which pause, and why it is not."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.launcher import restart
from torchmuster.launch.launcher.restart import PastAttempt, decide_restart


def attempt(error: str = "ValueError: no batch", **facts: Any) -> PastAttempt:
    what = f"rank 0 on a failed: {error}"
    finding = Finding(name="rank-failed", status=Status.FAILURE, what=what, why="at train.py:5")
    return PastAttempt(finding=finding, **facts)


KILLED = "killed (SIGKILL)"
IMPORT = "ModuleNotFoundError: No module named 'flash'"


@pytest.mark.parametrize(
    ("history", "max_restarts", "pause_s"),
    [
        ([attempt()], 0, None),
        ([attempt()], 2, 0.0),
        ([attempt()] * 2, 2, 2.0),
        ([attempt()] * 3, 2, None),
        ([attempt()] * 2, 1, None),
        ([attempt()] * 9, 20, 30.0),
        # Of a training, a newer checkpoint begins another row.
        ([attempt(KILLED, got_on=True, saved=10 * n) for n in range(1, 9)], 3, 0.0),
        (
            [
                attempt(KILLED, saved=10),
                attempt(KILLED, saved=10),
                attempt(KILLED, got_on=True, saved=20),
                attempt(KILLED, saved=20),
            ],
            3,
            2.0,
        ),
        ([attempt(saved=100)] * 4, 3, None),
        # What cannot mend itself is not repeated, unless it had worked before.
        ([attempt(IMPORT, mistake=True)], 3, None),
        ([attempt(KILLED), attempt(IMPORT, mistake=True)], 3, 2.0),
        ([attempt(IMPORT, mistake=True, saved=100)], 3, 0.0),
    ],
)
def test_the_decision(
    history: Sequence[PastAttempt], max_restarts: int, pause_s: float | None
) -> None:
    assert decide_restart(history, max_restarts=max_restarts).value == pause_s


def test_the_end_names_the_last_good_checkpoint() -> None:
    reason = decide_restart([attempt(saved=1200)] * 3, max_restarts=2).reason
    assert reason == "failed 3 times; allowed restarts: 2; the last good checkpoint is step 1,200"


def failed(
    what: str = "", error: str = "", exit_code: int = 1, ago_s: float = 0.0
) -> protocol.Failure:
    return protocol.Failure(rank=0, exit_code=exit_code, ago_s=ago_s, error=error, what=what)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([failed(error="ModuleNotFoundError: No module named 'flash'")], True),
        ([failed(error="SyntaxError: invalid syntax")], True),
        ([failed(exit_code=2)], True),
        ([failed(exit_code=21)], False),
        ([failed("the batch is too small")], True),
        ([failed(error="ValueError: no batch")], False),
        # What another rank said that only waited is not the cause.
        (
            [
                failed(exit_code=-9, ago_s=1.0),
                failed("the ranks' store became unreachable while waiting for the first rank"),
            ],
            False,
        ),
        ([], False),
    ],
)
def test_what_cannot_mend_itself(ranks: list[protocol.Failure], expected: bool) -> None:
    ended = protocol.Ended(attempt=0, good=False, failures=tuple(ranks))
    host: Any = SimpleNamespace(ended=ended, ended_s=10.0)
    assert restart.needs_user([host]) is expected


def test_what_is_said_at_a_restart() -> None:
    announced = restart.restart_announcement(attempt(KILLED, saved=1200), 2.0, "restart 1 of 3")
    what = f"rank 0 on a failed: {KILLED}; restarting from step 1,200 in 2 s (restart 1 of 3)"
    assert announced == what


def test_a_script_that_is_not_known_to_resume_is_not_said_to() -> None:
    last = replace(attempt(saved=1200), resumes=False)
    assert "1,200" not in restart.restart_announcement(last, 0.0, "restart 1 of 3")


def test_the_end_says_why_there_is_no_other_attempt_before_why_it_failed() -> None:
    failure = attempt().finding
    ended = restart.with_reason(failure, "failed 3 times")
    assert ended.what == failure.what
    assert ended.why == f"failed 3 times\n{failure.why}"
    assert restart.with_reason(failure, "") == failure
