"""Rows reach a tracker once each, whatever happens to it, and what it does never stops the training."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.history import run_state
from torchmuster.monitor import sinks
from torchmuster.monitor.sinks import Sender, send_in_background
from torchmuster.monitor.trackers import Row
from unit.monitor.written_run import WrittenRun


class MemoryTracker:
    """A tracker in memory, which lives longer than those who send to it."""

    def __init__(self) -> None:
        self.run = "their-id"
        self.steps: list[tuple[int, tuple[str, ...]]] = []
        self.opened: list[str] = []
        self.closed: list[bool] = []
        self.fails = False
        self.answers = threading.Event()
        self.answers.set()

    def open(self, name: str, run: object, experiment: str, known: str) -> "MemoryTracker":
        self.opened.append(known)
        return self

    def write(self, rows: Sequence[Row]) -> None:
        self.answers.wait()
        if self.fails:
            raise ConnectionError("not there, token=hf_abcdefghijklmnopqrstuvwx")
        self.steps += [(row.step, tuple(row.numbers)) for row in rows]

    def close(self, *, finished: bool) -> None:
        self.closed.append(finished)

    def of(self, table: str) -> list[int]:
        return [step for step, names in self.steps if any(one.startswith(table) for one in names)]


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> MemoryTracker:
    memory = MemoryTracker()
    monkeypatch.setattr(sinks, "open_tracker", memory.open)
    monkeypatch.setattr(sinks, "_POLL_EVERY_S", 0.01)
    monkeypatch.setattr(sinks, "FINISH_WITHIN_S", GIVE_UP_S)
    return memory


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path)


def await_true(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come: {what}"
        time.sleep(0.01)


def _send(written: WrittenRun) -> int:
    return Sender(written.run, "mlflow", "llama").send_new()


def test_a_training_sends_while_it_runs_and_the_rest_at_its_end(
    written: WrittenRun, tracker: MemoryTracker
) -> None:
    with send_in_background(written.run.path, ("mlflow",)) as missing:
        written.steps(1)
        await_true("the first step", lambda: tracker.of("train") == [1])
        written.steps(*range(2, 1000))
        written.evaluations(10, accuracy=0.5)
    assert tracker.of("train") == list(range(1, 1000))
    assert tracker.of("evaluation") == [10]
    assert (tracker.closed, missing) == ([True], {})


def test_each_step_is_sent_once_over_attempts(written: WrittenRun, tracker: MemoryTracker) -> None:
    written.steps(0, 1, 2, 3, 4)
    written.evaluations(4, accuracy=0.5)
    assert _send(written) == 6
    written.cut_off_after(2)  # as after a restart from step 2
    written.steps(3, 4, 5)
    written.evaluations(4, 5, accuracy=0.5)
    assert _send(written) == 2
    assert tracker.of("train") == [0, 1, 2, 3, 4, 5]
    assert tracker.of("evaluation") == [4, 5]
    assert tracker.opened == ["", "their-id"]


def test_a_tracker_that_fails_gets_the_rows_later(
    written: WrittenRun, tracker: MemoryTracker
) -> None:
    tracker.fails = True
    with send_in_background(written.run.path, ("mlflow",)) as missing:
        written.steps(1, 2)
        await_true("its error", lambda: tracker.closed == [False])
        tracker.fails = False
    assert (tracker.of("train"), missing) == ([1, 2], {})
    (event,) = run_state.read_events(written.run)
    what = "mlflow: cannot send metrics: ConnectionError: not there, token=[redacted]"
    assert event.facts["what"] == what
    assert len(tracker.opened) >= 2


def test_a_tracker_that_never_answers_is_left_at_the_end(
    written: WrittenRun, tracker: MemoryTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "FINISH_WITHIN_S", 0.05)
    tracker.answers.clear()
    written.steps(1)
    with send_in_background(written.run.path, ("mlflow",)) as missing:
        pass
    assert missing.keys() == {"mlflow"}
    tracker.answers.set()


def test_a_training_that_fails_tells_the_tracker(
    written: WrittenRun, tracker: MemoryTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_STOP_WITHIN_S", GIVE_UP_S)
    written.steps(1)
    with (
        pytest.raises(ValueError, match="of the training"),
        send_in_background(written.run.path, ("mlflow",)),
    ):
        raise ValueError("of the training")
    assert (tracker.of("train"), tracker.closed) == ([1], [False])


@pytest.mark.integrations
def test_tensorboard_has_every_step_once_with_its_time(written: WrittenRun) -> None:
    accumulators: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    written.steps(1, 2, loss=1.0)
    assert written.send("tensorboard") == 2
    written.cut_off_after(1)
    written.steps(2, loss=1.0)
    written.steps(3, loss=None)
    assert written.send("tensorboard") == 1
    seen = accumulators.EventAccumulator(str(written.run.metrics / "tensorboard"))
    seen.Reload()
    assert set(seen.Tags()["scalars"]) == {"train/loss", "train/epoch"}
    points = seen.Scalars("train/loss")
    assert [one.step for one in points] == [1, 2, 3]
    assert [str(one.value) for one in points] == ["1.0", "1.0", "nan"]
    assert points[0].wall_time == pytest.approx(1_700_000_001)


def test_a_value_that_is_not_finite_differs_from_one_that_is_missing() -> None:
    row_of: Callable[..., Row | None] = sinks.row_of
    bad = row_of("train", {"step": 1, "loss": None})
    without = row_of("train", {"step": 1, "epoch": 0})
    assert bad is not None
    assert without is not None
    assert str(bad.numbers["train/loss"]) == "nan"
    assert "train/loss" not in without.numbers
    assert row_of("train", {"loss": 1.0}) is None
