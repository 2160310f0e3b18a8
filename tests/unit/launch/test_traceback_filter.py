"""Tracebacks of ranks that fail stay in their logs; those of ranks that go on are shown."""

import pytest

from torchmuster.launch.launcher.traceback_filter import TracebackFilter

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ValueError: no
"""
CHAINED = f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"


class Ranks:
    """What ranks print, and what of it is shown."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.shown: list[tuple[int, str]] = []
        self.filter = TracebackFilter(
            lambda rank, text: self.shown.append((rank, text)), clock=lambda: self.now_s
        )

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.filter.show_due()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_other_lines_are_shown_at_once(ranks: Ranks) -> None:
    ranks.filter.output(0, "step 1\nstep 2\n")
    assert ranks.shown == [(0, "step 1\nstep 2\n")]


@pytest.mark.parametrize("text", [TRACEBACK, CHAINED, f"[rank1]: {TRACEBACK}"])
def test_the_traceback_of_a_rank_that_fails_is_not_shown(ranks: Ranks, text: str) -> None:
    ranks.filter.output(1, f"step 1\n{text}")
    ranks.filter.output(1, "[rank1]:[W1119 10:00:00.1 x.cpp:1] Warning: not destroyed\n")
    ranks.wait(5)
    ranks.filter.drop()
    ranks.filter.show_all()
    assert ranks.shown == [(1, "step 1\n")]


def test_the_traceback_of_a_rank_that_goes_on_is_shown(ranks: Ranks) -> None:
    ranks.filter.output(1, f"{TRACEBACK}caught it, step 2\n")
    ranks.wait(1)
    assert ranks.shown == []
    ranks.wait(3)
    assert ranks.shown == [(1, f"{TRACEBACK}caught it, step 2\n")]


def test_a_traceback_without_a_failure_is_shown_after_a_while_and_at_the_end(ranks: Ranks) -> None:
    ranks.filter.output(0, TRACEBACK)
    ranks.wait(11)
    ranks.filter.output(1, TRACEBACK)
    ranks.filter.show_all()
    assert ranks.shown == [(0, TRACEBACK), (1, TRACEBACK)]
