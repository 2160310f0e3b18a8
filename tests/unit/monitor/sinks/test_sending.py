"""Rows reach a sink in order and once each, whatever happens to it, to the run or to who sends."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import NotNow
from torchmuster.launch.history import run_state
from torchmuster.monitor.sinks import sent
from torchmuster.monitor.sinks.sending import Sending
from torchmuster.monitor.sinks.sink import Row
from unit.monitor.sinks.written_run import WrittenRun


class Tracker:
    """A tracker in memory, which lives longer than those who send to it."""

    def __init__(self, *, takes_back: bool = False) -> None:
        self.rows: list[tuple[str, int, float]] = []
        self.opened: list[str] = []
        self.fails = False
        self.ended: list[bool] = []
        self._takes_back = takes_back
        self.run = "their-id"

    def open(self, known: str) -> "Tracker":
        self._fail_if_wanted()
        self.opened.append(known)
        return self

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._fail_if_wanted()
            new = (row.table, row.step, row.numbers.get("train/loss", 0.0))
            if new not in self.rows:  # as Sink asks: what comes again after a failure is there once
                self.rows.append(new)

    def take_back(self, step: int) -> bool:
        if self._takes_back:
            self.rows = [row for row in self.rows if row[1] < step]
        return self._takes_back

    def close(self, *, finished: bool) -> None:
        self.ended.append(finished)

    def _fail_if_wanted(self) -> None:
        if self.fails:
            raise ConnectionError("not there, token=hf_abcdefghijklmnopqrstuvwx")

    @property
    def steps(self) -> list[int]:
        return [step for table, step, _ in self.rows if table == "train"]


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path)


def _sending(written: WrittenRun, tracker: Tracker) -> Sending:
    return Sending(written.run, "mlflow", tracker.open)


def test_rows_go_out_in_the_order_of_their_steps(written: WrittenRun) -> None:
    tracker = Tracker()
    sending = _sending(written, tracker)
    written.steps(1, 10)
    written.evaluations(10, accuracy=0.5)
    written.evaluations(15, accuracy=0.6)  # its step has no line yet: a later one must not overtake
    assert sending.send_new() == 3
    written.steps(20)
    sending.send_new()
    written.evaluations(25, accuracy=0.7)
    sending.send_new(last=True)
    assert [(table, step) for table, step, _ in tracker.rows] == [
        *(("train", 1), ("train", 10), ("evaluation", 10)),
        *(("evaluation", 15), ("train", 20), ("evaluation", 25)),
    ]


def test_who_comes_after_goes_on_in_the_same_run_of_the_tracker(written: WrittenRun) -> None:
    tracker = Tracker()
    written.steps(1, 2)
    first = _sending(written, tracker)
    first.send_new()
    first.close(finished=False)
    written.steps(3)
    second = _sending(written, tracker)
    assert second.send_new(last=True) == 1
    second.close(finished=True)
    assert tracker.opened == ["", "their-id"]
    assert tracker.steps == [1, 2, 3]
    assert tracker.ended == [False, True]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "alive"])
@pytest.mark.parametrize("takes_back", [True, False], ids=["takes back", "keeps"])
def test_steps_that_are_done_again_are_there_once(
    written: WrittenRun, takes_back: bool, killed: bool
) -> None:
    tracker = Tracker(takes_back=takes_back)
    sending = _sending(written, tracker)
    written.steps(1, 2, 3, 4, loss=1.0)
    written.evaluations(4, accuracy=0.5)
    sending.send_new(last=True)
    written.cut_off_after(2)
    written.steps(3, 4, 5, loss=9.0)
    written.evaluations(4, accuracy=0.5)
    if killed:
        sending = _sending(written, tracker)
    sending.send_new(last=True)
    assert tracker.steps == [1, 2, 3, 4, 5]
    assert [step for table, step, _ in tracker.rows if table == "evaluation"] == [4]
    again = 9.0 if takes_back else 1.0
    assert [loss for table, _, loss in tracker.rows if table == "train"] == [
        *(1.0, 1.0, again, again, 9.0)
    ]


def test_a_loss_that_is_no_number_is_one_that_is_not(written: WrittenRun) -> None:
    tracker = Tracker()
    written.steps(1, loss=None, gradient_norm=None)
    _sending(written, tracker).send_new()
    ((_, _, loss),) = tracker.rows
    assert loss != loss


def test_what_could_not_be_sent_is_sent_when_the_tracker_is_back(
    written: WrittenRun, snapshot: SnapshotAssertion
) -> None:
    tracker = Tracker()
    sending = _sending(written, tracker)
    written.steps(1)
    sending.send_new()
    tracker.fails = True
    written.steps(2, 3)
    with pytest.raises(ConnectionError) as error:
        sending.send_new()
    sending.give_up(error.value)
    far = sent.read_sent(written.run, "mlflow")
    assert far is not None
    assert far.trouble == "ConnectionError: not there, token=[redacted]"
    assert far.failing_s(far.trouble_since_unix_s + 70) == pytest.approx(70)
    assert far.train.step == 1
    tracker.fails = False
    written.steps(4)
    assert sending.send_new() == 3
    far = sent.read_sent(written.run, "mlflow")
    assert far is not None
    assert (far.trouble, far.failing_s(far.at_unix_s)) == ("", 0.0)
    assert tracker.steps == [1, 2, 3, 4]
    lost, back = [str(event.facts["what"]) for event in run_state.read_events(written.run)]
    assert "ConnectionError" in lost
    assert "token=[redacted]" in lost
    assert [lost, back] == snapshot


def test_a_tracker_that_fails_to_the_end_holds_nobody_up(written: WrittenRun) -> None:
    tracker = Tracker()
    tracker.fails = True
    written.steps(1, 2)
    ended = threading.Event()
    sending = _sending(written, tracker)
    thread = threading.Thread(target=sending.follow, args=(ended,))
    thread.start()
    ended.set()
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()
    sending.close(finished=True)
    far = sent.read_sent(written.run, "mlflow")
    assert far is not None
    assert (far.train.step, far.open, bool(far.trouble)) == (0, False, True)


def test_one_who_was_killed_is_missed(written: WrittenRun) -> None:
    tracker = Tracker()
    written.steps(1)
    _sending(written, tracker).send_new()  # and no word after that
    far = sent.read_sent(written.run, "mlflow")
    assert far is not None
    assert far.failing_s(far.at_unix_s + 10) == 0.0
    assert far.failing_s(far.at_unix_s + 100) == pytest.approx(100)


def test_only_one_sends_at_a_time(written: WrittenRun, snapshot: SnapshotAssertion) -> None:
    with sent.sent_lock(written.run, "mlflow"):
        with pytest.raises(NotNow, match="mlflow") as refused:
            sent.sent_lock(written.run, "mlflow").__enter__()
        assert refused.value == snapshot
        with sent.sent_lock(written.run, "wandb"):
            pass
    with sent.sent_lock(written.run, "mlflow"):
        pass


def test_many_lines_go_out_in_pieces(written: WrittenRun) -> None:
    tracker = Tracker()
    written.steps(*range(1, 1001))
    assert _sending(written, tracker).send_new() == 1000
    assert tracker.steps == list(range(1, 1001))
