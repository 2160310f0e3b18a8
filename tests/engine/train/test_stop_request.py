"""A request to end in one process: which signals count, and what is put back afterwards."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from patience import GIVE_UP_S
from torchmuster.errors import ExitCode
from torchmuster.train import stop_request
from torchmuster.train.stop_request import StoppedAtRequest, StopRequest

pytestmark = pytest.mark.engine

ALONE = made_up_world()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_ends_after_the_next_step_and_no_step_before(name: str) -> None:
    with StopRequest(ALONE) as stop:
        assert not stop.due(1)
        assert stop.origin == ""
        os.kill(os.getpid(), signal.Signals[name])
        _until(lambda: stop.origin != "")
        assert stop.due(2)
        assert stop.origin == f"{name} to rank 0"


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    heard: list[str] = []
    signalled = StopRequest._signalled

    def noted(stop: StopRequest, name: str) -> None:
        signalled(stop, name)
        heard.append(name)

    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(StopRequest, "_signalled", noted)
    monkeypatch.setattr(stop_request, "_SECOND_AFTER_S", GIVE_UP_S)
    with StopRequest(ALONE):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, by torchrun
        _until(lambda: len(heard) == 2)
        assert not codes
        monkeypatch.setattr(stop_request, "_SECOND_AFTER_S", 0.0)  # as if that time was over
        os.kill(os.getpid(), signal.SIGINT)
        _until(lambda: codes != [])
    assert codes[0] == ExitCode.INTERRUPTED


def test_a_handler_that_other_code_installs_does_not_hide_a_signal() -> None:
    called: list[int] = []
    with StopRequest(ALONE) as stop:
        signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        _until(lambda: stop.due(1))
    assert called == [signal.SIGUSR1]


def test_a_forked_process_answers_its_signals_itself() -> None:
    """As a loader's workers do, which are ended by SIGTERM."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with StopRequest(ALONE) as stop:
        for _ in range(10):  # some of them hear it before they do anything else
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            worker.terminate()
            worker.join(GIVE_UP_S)
            assert worker.exitcode == -signal.SIGTERM
            worker.close()
        time.sleep(0.1)
        assert not stop.due(1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_it_ends_the_process_with_the_code_for_starting_it_again(
    snapshot: SnapshotAssertion,
) -> None:
    end = StoppedAtRequest(120, "SIGUSR1 to rank 1")
    assert isinstance(end, SystemExit)
    assert end.code == 75
    assert int(ExitCode.SAVED) == 75
    assert "SIGUSR1 to rank 1" in end.what
    assert [end.what, end.fix] == snapshot


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + GIVE_UP_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)
