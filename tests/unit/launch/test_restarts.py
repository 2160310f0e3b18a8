"""When a run that failed is started again, after which pause, and why it is not."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.launcher import restart
from torchmuster.launch.launcher.restart import PastAttempt, decide_restart


def attempt(
    error: str = "ValueError: no batch",
    who: str = "rank 0 on a",
    name: str = "rank-failed",
    **facts: Any,
) -> PastAttempt:
    what = f"{who} failed: {error}"
    finding = Finding(name=name, status=Status.FAILURE, what=what, why="raised at train.py:5")
    return PastAttempt(finding=finding, error=error, **facts)


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
        (
            [attempt(KILLED, got_on=True, saved=10 * n, reached=10 * n + 3) for n in range(1, 9)],
            3,
            0.0,
        ),
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
        (
            [attempt(f"error {'ab'[n % 2]}", saved=100) for n in range(4)],
            3,
            None,
        ),
        # The same at the same place, whichever rank and whatever the numbers in the error.
        (
            [
                attempt("loss 3 at 0x7f", "rank 1 on a", got_on=True, saved=100, reached=120),
                attempt("loss 4 at 0x80", "rank 0 on b", saved=100, reached=120),
                attempt("loss 5 at 0x8f", "all 2 ranks", saved=100, reached=120),
            ],
            10,
            None,
        ),
        ([attempt(saved=100, reached=120 + n) for n in range(3)], 10, 4.0),
        ([attempt(saved=100)] * 3, 10, None),
        ([attempt(reached=7)] * 3, 10, None),
        # Whoever kills from outside may do so anywhere, and again.
        ([attempt(KILLED, name="rank-killed", saved=100, reached=120)] * 3, 10, 4.0),
        ([attempt("no heartbeat for 10 s", name="host-lost", saved=100)] * 3, 10, 4.0),
        # What cannot mend itself is not repeated, unless it had worked before.
        ([attempt(IMPORT, mistake=True)], 3, None),
        ([attempt(KILLED), attempt(IMPORT, mistake=True)], 3, 2.0),
        ([attempt(IMPORT, mistake=True, saved=100)], 3, 0.0),
        ([attempt(IMPORT, mistake=True, reached=4)], 3, 0.0),
    ],
)
def test_the_decision(
    history: Sequence[PastAttempt],
    max_restarts: int,
    pause_s: float | None,
    snapshot: SnapshotAssertion,
) -> None:
    chosen = decide_restart(history, max_restarts=max_restarts)
    assert chosen.value == pause_s
    assert chosen.reason == snapshot


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
    assert restart.needs_user(restart.first_failure([host])) is expected


@pytest.mark.parametrize(("saved", "pause_s"), [(None, 0.0), (1200, 0.0), (None, 2.0)])
def test_what_is_said_at_a_restart(
    saved: int | None, pause_s: float, snapshot: SnapshotAssertion
) -> None:
    announced = restart.restart_announcement(
        attempt(KILLED, saved=saved), pause_s, "restart 1 of 3"
    )
    assert announced.startswith(f"rank 0 on a failed: {KILLED}; ")
    assert announced == snapshot


def test_a_script_that_is_not_known_to_resume_is_not_said_to() -> None:
    last = replace(attempt(saved=1200), resumes=False)
    assert "1,200" not in restart.restart_announcement(last, 0.0, "restart 1 of 3")


def test_the_end_says_why_there_is_no_other_attempt_before_why_it_failed() -> None:
    failure = attempt().finding
    ended = restart.with_reason(failure, "crash loop")
    assert ended.what == failure.what
    assert ended.why == f"crash loop\n{failure.why}"
    assert restart.with_reason(failure, "") == failure
