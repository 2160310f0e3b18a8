"""Two who measure take turns: one at a time, as often, and nobody waits for one that is gone."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.bench.interleaved import SIDES, VARIABLE, Referee, Turns, interleaved_pair_id


@pytest.fixture
def referee() -> Iterator[Referee]:
    with Referee(seed=1) as one:
        yield one


def joined(referee: Referee, side: str, monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setenv(VARIABLE, str(referee.paths[side]))
    return Turns()


class Measuring(threading.Thread):
    """One side, which notes when it begins and ends a sample."""

    def __init__(self, side: str, turns: Turns, samples: int, heard: list[str]) -> None:
        super().__init__()
        self.side, self.turns, self.samples, self.heard = side, turns, samples, heard

    def run(self) -> None:
        for _ in range(self.samples):
            with self.turns:
                self.heard.append(f"{self.side} begins")
                time.sleep(0.001)  # so that who does not wait is found out
                self.heard.append(f"{self.side} ends")
        self.turns.close()


def test_each_has_one_sample_in_every_round_and_never_both_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    with Referee(seed=1) as referee:  # who has heard of the last turn when this ends, too
        both = [Measuring(side, joined(referee, side, monkeypatch), 30, heard) for side in SIDES]
        for one in both:
            one.start()
        for one in both:
            one.join(GIVE_UP_S)
    turns = [heard[at : at + 2] for at in range(0, len(heard), 2)]
    assert all(begin.split()[0] == end.split()[0] for begin, end in turns)
    rounds = [(turns[at][0].split()[0], turns[at + 1][0].split()[0]) for at in range(0, 60, 2)]
    assert all(set(one) == set(SIDES) for one in rounds)
    assert len(set(rounds)) == 2, "who is first changes"
    assert referee.taken == {"before": 30, "after": 30}


def test_nobody_begins_before_the_other_is_ready(
    referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    before = Measuring("before", joined(referee, "before", monkeypatch), 3, heard)
    after = Measuring("after", joined(referee, "after", monkeypatch), 3, heard)
    before.start()
    before.join(0.2)
    assert heard == [], "the other one still warms up"
    after.start()
    for one in (before, after):
        one.join(GIVE_UP_S)
    assert len(heard) == 12


def test_who_has_ended_is_not_waited_for(referee: Referee, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    one = Measuring("after", joined(referee, "after", monkeypatch), 5, heard)
    one.start()
    referee.has_ended("before")
    one.join(GIVE_UP_S)
    assert len(heard) == 10


def test_who_dies_in_its_turn_gives_it_back(
    referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    dying = joined(referee, "before", monkeypatch)
    other = Measuring("after", joined(referee, "after", monkeypatch), 5, heard)
    other.start()
    dying.__enter__()
    dying.close()
    referee.has_ended("before")
    other.join(GIVE_UP_S)
    assert len(heard) == 10


def test_alone_it_is_always_ones_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with Turns() as mine:
        mine.stay_on_one_core()
    mine.close()
    assert interleaved_pair_id() == ""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no cores to choose")
def test_both_stay_on_the_same_core_and_may_leave_it_again(
    referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.sched_getaffinity(0)
    cores = []
    for side in SIDES:
        turns = joined(referee, side, monkeypatch)
        turns.stay_on_one_core()
        cores.append(os.sched_getaffinity(0))
        turns.close()
        assert os.sched_getaffinity(0) == usual
    assert cores[0] == cores[1]
    assert len(cores[0]) == 1


def test_the_records_of_a_pair_have_the_same_name(
    referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for path in referee.paths.values():
        monkeypatch.setenv(VARIABLE, str(path))
        names.add(interleaved_pair_id())
    assert len(names) == 1
    assert Path(referee.paths["before"]).parent.name in names
