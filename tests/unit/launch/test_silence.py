"""What the launcher prints while no rank prints anything."""

from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.launcher.silence import SilenceWatch, activity_text


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def rank(number: int, **facts: object) -> Heartbeat:
    return Heartbeat(rank=number, pid=100 + number, beat=1, moves=1, **facts)  # type: ignore[arg-type]


def said_in(silence: SilenceWatch, clock: Clock, ranks: list[Heartbeat], polls: int) -> list[str]:
    """Poll as the launcher does: first after 5 s, then every 9 s."""
    said = []
    for poll in range(polls):
        clock.now_s += 9.0 if poll else 5.0
        said.append(silence.words(ranks))
    return [words for words in said if words]


def test_what_starting_ranks_do_is_printed_less_and_less_often(
    snapshot: SnapshotAssertion,
) -> None:
    clock = Clock()
    silence = SilenceWatch(clock)
    silence.heard("[W1115 13:00:00.1 socket.cpp:1] a warning of torch's\n")
    said = said_in(silence, clock, [], 3)
    assert len(said) == 1
    importing = [rank(one, doing="import torch", place="train.py:3") for one in (0, 1)]
    said += said_in(silence, clock, importing, 60)  # 9 minutes
    assert len(said) == 5
    assert said == snapshot
    silence.heard("loss 1\n")
    assert silence.words(importing) == ""


def test_a_silence_is_told_when_it_is_twice_as_long_as_the_last_one_told(
    snapshot: SnapshotAssertion,
) -> None:
    clock = Clock()
    silence = SilenceWatch(clock)
    silence.heard("loss 1\n")
    said = said_in(silence, clock, [], 50)
    assert len(said) == 4
    assert said == snapshot
    silence.heard("loss 2\n")
    clock.now_s += 60.0  # such silences are known by now
    assert silence.words() == ""


def test_ranks_that_do_the_same_are_named_together(snapshot: SnapshotAssertion) -> None:
    loading = {"phase": "loading data", "step": 7, "place": "train.py:40 in main"}
    ranks = [rank(0, **loading), rank(1, doing="barrier", place="train.py:44"), rank(2, **loading)]
    exited = rank(3, state="X", doing="time.sleep", place="train.py:1")
    assert activity_text([*ranks, exited]) == snapshot
    assert activity_text(ranks[:1], together="all ranks: ") == snapshot
    assert activity_text([exited]) == activity_text([rank(0)]) == ""
    several = [rank(number, doing="read", place=f"train.py:{number}") for number in range(6)]
    assert activity_text(several) == snapshot
