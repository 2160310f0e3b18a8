"""When the ranks of a borrower are stopped, what is released when they have exited, and how it is reported."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any, cast

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import gpu
from torchmuster.decision import Decision
from torchmuster.devices.borrow import DeviceRange
from torchmuster.devices.model import Device
from torchmuster.devices.request import GIVEN_BACK_WITHIN_S
from torchmuster.launch import protocol
from torchmuster.launch.history import failure_report, run_state
from torchmuster.launch.launcher.borrowing import note_change
from torchmuster.launch.launcher.node_handle import NodeHandle, devices_change
from torchmuster.launch.launcher.training_progress import TrainingProgress
from torchmuster.launch.node import borrowing
from torchmuster.launch.node.borrowing import BorrowingWatch
from torchmuster.runfolder import create_run_folder

NOTHING: Decision[tuple[Device, ...]] = Decision(value=(), reason="")


class Range:
    """The GPUs of a run: those that are asked back, and those that are idle."""

    def __init__(self) -> None:
        self.asked = self.idle = NOTHING
        self.released: list[Device] = []
        self.idle_for_s: list[float] = []
        self.has_all = False

    def find_returns(self, _: object) -> Decision[tuple[Device, ...]]:
        return self.asked

    def extend(self, _: object, *, idle_for_s: float) -> Decision[tuple[Device, ...]]:
        self.idle_for_s.append(idle_for_s)
        return NOTHING if math.isinf(idle_for_s) else self.idle

    def release(self, devices: Any) -> None:
        self.released += devices


class Ranks:
    """The ranks of an attempt, and what they are sent."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[str | float] = []

    def handles(self, _: str) -> bool:
        return self.is_ready

    def warn(self, name: str) -> None:
        self.sent.append(name)

    def stop(self, grace_s: float) -> None:
        self.sent.append(grace_s)


class Watched:
    """A watch with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_s: float = 300.0) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.range, self.ranks = Range(), Ranks()
        self.running: Ranks | None = self.ranks
        self.watch = BorrowingWatch(
            cast(DeviceRange, self.range), lambda: cast(Any, self.running), borrow_every_s=every_s
        )

    def look(self, after_s: float = 1.0) -> None:
        self.now_s += after_s
        asyncio.run(self.watch.look())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_request_stops_the_ranks_once_and_their_exit_releases_the_gpus(watched: Watched) -> None:
    watched.look()
    assert watched.ranks.sent == []
    watched.range.asked = Decision(value=(gpu(6), gpu(7)), reason="ben requested 2 GPUs")
    watched.look()
    watched.look()
    (grace_s,) = watched.ranks.sent
    assert isinstance(grace_s, float)
    assert grace_s + 8 < GIVEN_BACK_WITHIN_S  # to notice the request, and to kill ranks
    assert watched.range.released == []
    watched.now_s += 2.5
    change = watched.watch.exited()
    assert watched.range.released == [gpu(6), gpu(7)]
    assert change is not None
    assert (change.given_back, change.borrowed) == (("GPU 6", "GPU 7"), ())
    assert change.seconds == 3.5
    assert watched.watch.exited() is None


def test_without_ranks_gpus_are_released_at_once_but_not_while_they_start(watched: Watched) -> None:
    watched.running = None
    watched.range.asked = Decision(value=(gpu(7),), reason="ben requested 1 GPU")
    watched.look()
    assert watched.range.released == []
    watched.watch.exited()
    watched.look()
    assert watched.range.released == [gpu(7)]
    change = watched.watch.prepared()
    assert change is not None
    assert change.given_back == ("GPU 7",)


def test_it_grows_only_when_ranks_train_and_not_more_often_than_asked(watched: Watched) -> None:
    watched.range.idle = Decision(value=(gpu(3),), reason="1 GPU idle for 300 s")
    watched.ranks.is_ready = False
    watched.look(400)
    assert watched.ranks.sent == []
    watched.ranks.is_ready = True
    watched.look(200)
    assert watched.ranks.sent == []
    watched.look(101)
    watched.look()
    assert watched.ranks.sent == ["SIGUSR1", "SIGUSR1"]
    assert watched.range.idle_for_s[-1] == 300.0
    assert all(math.isinf(one) for one in watched.range.idle_for_s[:-1])
    change = watched.watch.exited()
    assert change is not None
    assert (change.given_back, change.borrowed) == ((), ("GPU 3",))
    watched.ranks.sent.clear()
    watched.look(299)
    assert watched.ranks.sent == []


def test_new_gpus_that_are_asked_back_before_their_ranks_start(watched: Watched) -> None:
    watched.range.idle = Decision(value=(gpu(3),), reason="idle")
    watched.look(301)
    watched.range.asked = Decision(value=(gpu(3), gpu(2)), reason="ben requested 2 GPUs")
    watched.look()
    assert watched.range.released == [gpu(3)]
    assert watched.ranks.sent == ["SIGUSR1", borrowing.RETURN_GRACE_S]
    change = watched.watch.exited()
    assert change is not None
    assert (change.given_back, change.borrowed) == (("GPU 2",), ())


def test_new_gpus_alone_are_released_at_once_and_no_rank_is_hurried(watched: Watched) -> None:
    watched.range.idle = Decision(value=(gpu(3), gpu(4)), reason="idle")
    watched.look(301)
    watched.range.asked = Decision(value=(gpu(3),), reason="ben requested 1 GPU")
    watched.look()
    watched.range.asked = NOTHING
    watched.look()
    assert watched.range.released == [gpu(3)]
    assert watched.ranks.sent == ["SIGUSR1", "SIGUSR1"]
    change = watched.watch.exited()
    assert change is not None
    assert (change.given_back, change.borrowed) == ((), ("GPU 4",))


def test_ranks_that_do_not_save_continue_without_the_new_gpus(watched: Watched) -> None:
    watched.range.idle = Decision(value=(gpu(3),), reason="idle")
    watched.look(301)
    watched.range.idle = NOTHING
    watched.look(200)
    assert watched.range.released == [gpu(3)]
    assert watched.watch.exited() is None


def ended(*codes: int, change: bool = True) -> NodeHandle:
    node = NodeHandle(0, "a", cast(Any, None), "part")
    node.ended = protocol.Ended(
        attempt=0,
        good=False,
        failures=tuple(
            protocol.Failure(rank=rank, local_rank=rank, exit_code=code, ago_s=0.0)
            for rank, code in enumerate(codes)
        ),
        change=protocol.DevicesChange(given_back=("GPU 1",), reason="x", seconds=1.0)
        if change
        else None,
    )
    return node


def test_a_rank_that_fails_by_itself_is_a_failure() -> None:
    for codes in ((75, 75), (-15,), (75, -9), (-9, -9), ()):
        assert devices_change([ended(*codes)]) is not None, codes
    assert devices_change([ended(75, 1)]) is None
    assert devices_change([ended(75, -11)]) is None
    assert devices_change([ended(75, change=False)]) is None


def test_each_change_is_in_the_run_s_timeline(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    run = create_run_folder(tmp_path, "x")
    given = protocol.DevicesChange(
        given_back=("GPU 2", "GPU 3"), reason="eva requested 2 GPUs", seconds=4.125
    )
    more = protocol.DevicesChange(borrowed=("GPU 4",), reason="1 GPU idle for 300 s", seconds=1.0)
    progress = TrainingProgress(saved=1200)
    said = [note_change(run, given, progress), note_change(run, more, progress)]
    said.append(note_change(run, given))
    events = run_state.read_events(run)
    assert [one.name for one in events] == [
        run_state.GIVEN_BACK,
        run_state.BORROWED,
        run_state.GIVEN_BACK,
    ]
    assert events[0].facts["gpus"] == ["GPU 2", "GPU 3"]
    assert events[0].facts["seconds"] == 4.125
    assert events[0].facts["from_step"] == 1200
    assert [one.what for one in failure_report.Timeline.of(run).moments()] == said
    assert said == snapshot
