"""A request to end in one process: which signals count, and what is put back afterwards."""

import multiprocessing
import os
import signal
import threading
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
        assert stop.words == ""
        os.kill(os.getpid(), signal.Signals[name])
        _until(lambda: stop.words != "")
        assert stop.due(2)
        assert stop.words == f"{name} to rank 0"


def test_schedulers_repeat_their_signals_which_changes_nothing() -> None:
    with StopRequest(ALONE) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
        _until(lambda: stop.words != "")
        assert stop.due(1)
        assert stop.words in ("SIGTERM to rank 0", "SIGUSR1 to rank 0")


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


def test_everything_is_as_before_afterwards() -> None:
    names = ("SIGINT", "SIGTERM", "SIGUSR1")
    before = [signal.getsignal(signal.Signals[name]) for name in names]
    threads = threading.active_count()
    with StopRequest(ALONE):
        assert [signal.getsignal(signal.Signals[name]) for name in names] != before
    assert [signal.getsignal(signal.Signals[name]) for name in names] == before
    descriptor = signal.set_wakeup_fd(-1)
    assert descriptor == -1
    assert threading.active_count() == threads


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


def test_in_another_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with StopRequest(ALONE) as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.due(1)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_it_ends_the_process_with_the_code_for_starting_it_again(
    snapshot: SnapshotAssertion,
) -> None:
    end = StoppedAtRequest(120, "SIGUSR1 to rank 1")
    assert isinstance(end, SystemExit)
    assert end.code == 75
    assert int(ExitCode.SAVED) == 75
    assert "SIGUSR1 to rank 1" in end.what
    assert [end.what, end.fix] == snapshot


def test_who_is_on_its_way_out_is_not_ended_by_another_warning() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(StoppedAtRequest), StopRequest(ALONE) as stop:
            raise StoppedAtRequest(3, stop.words)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + GIVE_UP_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)
