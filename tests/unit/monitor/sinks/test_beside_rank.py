"""The process beside rank 0: it sends while the training goes on, and whatever happens to it does nothing to that."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from mlflow_stand_in import silent_server
from patience import GIVE_UP_S
from torchmuster.monitor.sinks import sent, sidecar
from torchmuster.monitor.sinks.sidecar import not_sent_finding, send_in_background
from torchmuster.monitor.sinks.sink import Wanted
from unit.monitor.sinks.written_run import WrittenRun

pytestmark = pytest.mark.integrations

FILES = Wanted(sinks=("tensorboard",))


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    pytest.importorskip("tensorboard")
    return WrittenRun(tmp_path)


@pytest.fixture
def time_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end all is sent, here and in the process that sends, which a busy machine lets run last."""
    first = tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text(
        f"from torchmuster.monitor.sinks import sidecar\nsidecar.FINISH_WITHIN_S = {GIVE_UP_S}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(first), prepend=os.pathsep)
    monkeypatch.setattr(sidecar, "FINISH_WITHIN_S", GIVE_UP_S)


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come: {what}"
        time.sleep(0.02)


def _sender() -> psutil.Process:
    (process,) = [
        one
        for one in psutil.Process().children()
        if "torchmuster.monitor.sinks" in " ".join(one.cmdline())
    ]
    return process


def _reached(written: WrittenRun, sink: str) -> int:
    far = sent.read_sent(written.run, sink)
    return far.train.step if far is not None else 0


@pytest.mark.usefixtures("time_enough")
def test_it_sends_as_lines_come_and_the_rest_at_the_end(written: WrittenRun) -> None:
    with send_in_background(written.run.path, FILES):
        written.steps(1)
        _await(lambda: _reached(written, "tensorboard") == 1, "the first step")
        written.steps(*range(2, 100))
    assert _reached(written, "tensorboard") == 99
    assert not_sent_finding(written.run, FILES.sinks) == []
    assert (written.run.logs / "sinks.log").read_text() == ""


@pytest.mark.usefixtures("time_enough")
def test_it_is_killed_and_the_training_goes_on(
    written: WrittenRun, snapshot: SnapshotAssertion
) -> None:
    with send_in_background(written.run.path, FILES):
        written.steps(1)
        _await(lambda: _reached(written, "tensorboard") == 1, "the first step")
        _sender().kill()
        written.steps(2, 3)
    told = not_sent_finding(written.run, FILES.sinks)
    assert [one.partition(" ")[0] for one in told] == ["tensorboard"]
    assert told[0].replace(str(written.run.path), "RUN") == snapshot
    with send_in_background(written.run.path, FILES):  # as in the next attempt
        pass
    assert _reached(written, "tensorboard") == 3
    assert not_sent_finding(written.run, FILES.sinks) == []


@pytest.mark.usefixtures("time_enough")
def test_it_ends_when_its_rank_is_killed(written: WrittenRun) -> None:
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            with send_in_background(written.run.path, FILES):
                written.steps(1)
                _await(lambda: _reached(written, "tensorboard") == 1, "the first step")
                written.steps(2)
                os.write(write, str(_sender().pid).encode())
                signal.pause()
        os._exit(1)
    os.close(write)
    sender = psutil.Process(int(os.read(read, 100)))
    os.close(read)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    _await(lambda: _is_gone(sender), "its end")
    assert _reached(written, "tensorboard") == 2, "what was written is sent"


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_tracker_that_never_answers_takes_ten_seconds_at_the_end_and_no_more(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    written.steps(1)
    with silent_server() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        wanted = Wanted(sinks=("mlflow", "tensorboard"))
        with send_in_background(written.run.path, wanted):
            _await(lambda: _reached(written, "tensorboard") == 1, "the other sink")
    assert _reached(written, "mlflow") == 0
    (told,) = not_sent_finding(written.run, wanted.sinks)
    assert told.startswith("mlflow ")
    assert "TimeoutError: no answer within 10 s" in told


def test_who_fails_does_not_wait_for_a_tracker(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    written.steps(1)
    with silent_server() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with (
            pytest.raises(ValueError, match="of the training"),
            send_in_background(written.run.path, Wanted(sinks=("mlflow",))),
        ):
            raise ValueError("of the training")


def test_without_sinks_there_is_no_process(written: WrittenRun) -> None:
    before = psutil.Process().children()
    with send_in_background(written.run.path, Wanted()):
        assert psutil.Process().children() == before
    assert not (written.run.metrics / "sinks").exists()
