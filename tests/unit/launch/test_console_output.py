"""What the launcher shows of the ranks' output, and what it prints while no rank prints anything."""

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.launcher.rank_output import ShownOutput, activity_text


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def rank(number: int, **facts: object) -> Heartbeat:
    return Heartbeat(rank=number, pid=100 + number, beat=1, moves=1, **facts)  # type: ignore[arg-type]


def said_in(silence: ShownOutput, clock: Clock, ranks: list[Heartbeat], polls: int) -> list[str]:
    """Poll as the launcher does: first after 5 s, then every 9 s."""
    said = []
    for poll in range(polls):
        clock.now_s += 9.0 if poll else 5.0
        said.append(silence.silence_text(ranks))
    return [words for words in said if words]


def test_what_starting_ranks_do_is_printed_less_and_less_often(
    snapshot: SnapshotAssertion,
) -> None:
    clock = Clock()
    silence = ShownOutput(lambda *_: None, clock)
    silence.add(0, "[W1115 13:00:00.1 socket.cpp:1] a warning of torch's\n")
    said = said_in(silence, clock, [], 3)
    assert len(said) == 1
    importing = [rank(one, doing="import torch", place="train.py:3") for one in (0, 1)]
    said += said_in(silence, clock, importing, 60)  # 9 minutes
    assert len(said) == 5
    assert said == snapshot
    silence.add(0, "loss 1\n")
    assert silence.silence_text(importing) == ""


def test_a_silence_is_told_when_it_is_twice_as_long_as_the_last_one_told(
    snapshot: SnapshotAssertion,
) -> None:
    clock = Clock()
    silence = ShownOutput(lambda *_: None, clock)
    silence.add(0, "loss 1\n")
    said = said_in(silence, clock, [], 50)
    assert len(said) == 4
    assert said == snapshot
    silence.add(0, "loss 2\n")
    clock.now_s += 60.0  # such silences are known by now
    assert silence.silence_text([]) == ""


def test_ranks_that_do_the_same_are_named_together(snapshot: SnapshotAssertion) -> None:
    loading = {"phase": "loading data", "step": 7, "place": "train.py:40 in main"}
    ranks = [rank(0, **loading), rank(1, doing="barrier", place="train.py:44"), rank(2, **loading)]
    exited = rank(3, state="X", doing="time.sleep", place="train.py:1")
    assert activity_text([*ranks, exited]) == snapshot
    assert activity_text(ranks[:1], together="all ranks: ") == snapshot
    assert activity_text([exited]) == activity_text([rank(0)]) == ""
    several = [rank(number, doing="read", place=f"train.py:{number}") for number in range(6)]
    assert activity_text(several) == snapshot


# ---- tracebacks of ranks that fail stay in their logs; those of ranks that go on are shown


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
        self.filter = ShownOutput(
            lambda rank, text: self.shown.append((rank, text)), clock=lambda: self.now_s
        )

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.filter.show_due()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_other_lines_are_shown_at_once(ranks: Ranks) -> None:
    ranks.filter.add(0, "step 1\nstep 2\n")
    assert ranks.shown == [(0, "step 1\nstep 2\n")]


@pytest.mark.parametrize("text", [TRACEBACK, CHAINED, f"[rank1]: {TRACEBACK}"])
def test_the_traceback_of_a_rank_that_fails_is_not_shown(ranks: Ranks, text: str) -> None:
    ranks.filter.add(1, f"step 1\n{text}")
    ranks.filter.add(1, "[rank1]:[W1119 10:00:00.1 x.cpp:1] Warning: not destroyed\n")
    ranks.wait(5)
    ranks.filter.drop()
    ranks.filter.show_all()
    assert ranks.shown == [(1, "step 1\n")]


def test_a_traceback_without_a_failure_is_shown_after_a_while_and_at_the_end(ranks: Ranks) -> None:
    ranks.filter.add(0, TRACEBACK)
    ranks.wait(11)
    ranks.filter.add(1, TRACEBACK)
    ranks.filter.show_all()
    assert ranks.shown == [(0, TRACEBACK), (1, TRACEBACK)]
