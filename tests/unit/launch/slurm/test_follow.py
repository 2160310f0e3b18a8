"""Following a job: never silent while it waits, every line of its log once, whatever Slurm does."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch.schedulers.slurm.follow import (
    LogLine,
    Poll,
    PollRhythm,
    follow_job,
    left_running,
)
from torchmuster.launch.schedulers.slurm.jobs import JobState, Kind, require_slurm

FAST = PollRhythm(look_s=0.01, poll_s=0.02, say_s=0.1)
# Says nothing twice, however late Slurm's answer comes on a busy machine.
ONCE = PollRhythm(look_s=0.01, poll_s=0.02, say_s=GIVE_UP_S)


def state(kind: Kind, log: Path | None = None, reason: str = "") -> JobState:
    return JobState(job="7", kind=kind, words=kind, log=log, reason=reason)


def one_after_another(*states: JobState) -> Poll:
    """Answer with each state in turn, then with the last for ever."""
    left: Iterator[JobState] = iter(states)
    return lambda job: next(left, states[-1])


def test_the_reason_for_waiting_is_said_again() -> None:
    events = follow_job("7", rhythm=FAST, poll=lambda job: state("pending", reason="Priority"))
    times = []
    for event in events:
        assert isinstance(event, JobState)
        if event.kind == "unknown":  # the first answer may take its time
            continue
        times.append(time.monotonic())
        if len(times) == 4:
            break
    events.close()  # type: ignore[attr-defined]
    assert times[-1] - times[0] >= 2.9 * FAST.say_s


def test_a_controller_that_takes_its_time_does_not_make_us_silent() -> None:
    answered = threading.Event()

    def poll(job: str) -> JobState:
        answered.wait(GIVE_UP_S)
        return state("done")

    events = follow_job("7", rhythm=FAST, poll=poll)
    assert next(events) == JobState(job="7", kind="unknown", words="querying Slurm for job 7")
    answered.set()
    *before, last = [one.kind for one in events if isinstance(one, JobState)]
    assert last == "done"
    assert set(before) <= {"unknown"}  # said again, where the answer takes its time


def test_every_line_comes_once_and_the_unfinished_one_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.log"
    events = follow_job("7", rhythm=ONCE, poll=one_after_another(state("running", log)))
    assert next(events) == state("running", log)
    log.write_bytes(b"first\nsec")
    assert next(events) == LogLine(text="first")
    with log.open("ab") as stream:
        stream.write("ond ü\r\n".encode() + b"bad \xff\n")
    assert next(events) == LogLine(text="second ü")
    assert next(events) == LogLine(text="bad \N{REPLACEMENT CHARACTER}")
    events.close()  # type: ignore[attr-defined]
    with log.open("ab") as stream:
        stream.write(b"end")
    seen = list(follow_job("7", rhythm=ONCE, poll=one_after_another(state("done", log))))
    assert seen[0] == state("done", log)
    assert [one.text for one in seen[1:] if isinstance(one, LogLine)] == [
        "first",
        "second ü",
        "bad \N{REPLACEMENT CHARACTER}",
        "end",
    ]


def test_a_log_that_begins_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a long first line\n")
    over = threading.Event()
    events = follow_job(
        "7", rhythm=ONCE, poll=lambda job: state("done" if over.is_set() else "running", log)
    )
    assert [next(events), next(events)][1] == LogLine(text="a long first line")
    log.write_text("again\n")
    assert next(events) == LogLine(text="again")
    over.set()
    assert [one for one in events if isinstance(one, LogLine)] == []


def test_when_slurm_does_not_answer_the_log_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    polls = one_after_another(state("running", log), state("unknown"))
    events = follow_job("7", rhythm=ONCE, poll=polls)
    assert next(events) == state("running", log)
    assert next(events) == state("unknown", log)
    log.write_text("still here\n")
    assert next(events) == LogLine(text="still here")
    events.close()  # type: ignore[attr-defined]


def test_an_error_of_the_poll_is_raised_to_the_follower() -> None:
    def poll(job: str) -> JobState:
        require_slurm(["no-such-client"])
        raise AssertionError

    with pytest.raises(Impossible, match="no-such-client"):
        list(follow_job("7", rhythm=FAST, poll=poll))


def test_leaving_says_how_to_stop_the_job(snapshot: SnapshotAssertion) -> None:
    assert "scancel 7" in left_running("7")
    assert left_running("7") == snapshot


def test_nobody_waits_ten_seconds_for_a_word() -> None:
    usual = PollRhythm()
    assert usual.say_s + usual.look_s < 10
