"""Of a host whose ranks all make progress, only the first rank's heartbeat is sent."""

import msgspec
import pytest

from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.node.attempt import are_moving

BEFORE = tuple(Heartbeat(rank=rank, pid=10 + rank, beat=1, moves=5, state="R") for rank in range(3))
NOW = tuple(msgspec.structs.replace(one, beat=2, moves=6) for one in BEFORE)


def changed(rank: int, **fields: object) -> tuple[Heartbeat, ...]:
    return tuple(msgspec.structs.replace(one, **fields) if one.rank == rank else one for one in NOW)


def test_ranks_that_all_made_progress_are_moving() -> None:
    assert are_moving(BEFORE, NOW)


@pytest.mark.parametrize(
    "now",
    [
        (),
        NOW[:2],
        changed(2, moves=5),  # no progress
        changed(1, pid=99),  # another process
        changed(1, state="T"),
        changed(1, state="D"),
        changed(1, silent_s=4.0),
        changed(1, handles=("SIGUSR1",)),  # news that the launcher needs
    ],
)
def test_anything_else_is_sent_whole(now: tuple[Heartbeat, ...]) -> None:
    assert not are_moving(BEFORE, now)


def test_the_first_message_is_whole() -> None:
    assert not are_moving((), NOW)


def test_a_moving_host_is_not_part_of_a_hang_and_a_hang_after_it_is_found() -> None:
    at_s = 0.0
    watch = HangWatch(lambda: at_s)

    def told(rank: int, moves: int, *, waiting: bool) -> Heartbeat:
        return Heartbeat(
            rank=rank,
            pid=10 + rank,
            beat=int(at_s),
            moves=moves,
            state="S",
            busy=0.0,
            doing="all_reduce" if waiting else "time.sleep",
            place="train.py:8 in step",
            waiting=waiting,
            begun={"default": 20},
        )

    for moves in range(20, 60):
        at_s += 2.0
        whole = moves == 20
        ranks = [told(rank, moves, waiting=False) for rank in range(4)]
        watch.heard("a", ranks[:2] if whole else ranks[:1], moving=not whole)
        watch.heard("b", ranks[2:] if whole else ranks[2:3], moving=not whole)
        assert watch.look() is None
    found = None
    while found is None:  # then rank 3 sleeps, and the others wait for it
        at_s += 2.0
        assert at_s < 200
        ranks = [told(rank, 60, waiting=rank != 3) for rank in range(4)]
        watch.heard("a", ranks[:2])
        watch.heard("b", ranks[2:])
        found = watch.look()
    assert watch.told is not None
    assert [one.rank for one in watch.told.culprits] == [3]


def test_a_hang_that_resolves_on_moving_hosts_is_over() -> None:
    at_s = 0.0
    watch = HangWatch(lambda: at_s)

    def told(moves: int, *, waiting: bool) -> list[Heartbeat]:
        return [
            Heartbeat(
                rank=rank,
                pid=10 + rank,
                beat=int(at_s),
                moves=moves,
                state="S",
                busy=0.0,
                doing="all_reduce" if waiting and rank else "time.sleep",
                place="train.py:8 in step",
                waiting=waiting and rank > 0,
                begun={"default": 20},
            )
            for rank in range(4)
        ]

    found = None
    while found is None:  # rank 0 keeps the others waiting
        at_s += 2.0
        assert at_s < 200
        watch.heard("a", told(20, waiting=True))
        found = watch.look()
    at_s += 2.0
    watch.heard("a", told(21, waiting=False)[:1], moving=True)
    over = watch.look()
    assert over is not None
    assert watch.told is None
