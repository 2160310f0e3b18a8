"""Whatever becomes of a run's report, the run's end is what it was."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from made_up_runs import a_run, add_lines, set_state
from patience import GIVE_UP_S
from torchmuster.cli import reporting
from torchmuster.cli.reporting import with_report
from torchmuster.runfolder import RunFolder

NOW = 1_000_000_000.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(reporting, "_AT_MOST_S", GIVE_UP_S)
    run = a_run(tmp_path)
    add_lines(run)
    return run


def _work(run: RunFolder, phase: str, code: int) -> int:
    """Be a run that ends."""
    set_state(run, phase, now=NOW)
    return code


@pytest.mark.parametrize(
    ("phase", "code"), [("finished", 0), ("failed", 1), ("stopped", 130), ("saved", 75)]
)
def test_a_run_leaves_its_report_at_its_end(run: RunFolder, phase: str, code: int) -> None:
    assert with_report(run, lambda: _work(run, phase, code)) == code
    assert f">{phase}</b></h1>" in run.report.read_text()


def test_a_run_that_raises_leaves_one_as_well(run: RunFolder) -> None:
    def fail() -> int:
        _work(run, "failed", 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_report(run, fail)
    assert run.report.exists()


def test_a_run_that_is_not_over_leaves_none(run: RunFolder) -> None:
    assert with_report(run, lambda: 3) == 3
    assert not run.report.exists()


def test_a_script_that_ended_well_without_steps_leaves_none(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert with_report(run, lambda: _work(run, "finished", 0)) == 0
    assert not run.report.exists()


def test_who_comes_second_leaves_the_report_alone(run: RunFolder) -> None:
    with_report(run, lambda: _work(run, "finished", 0))
    made = run.report.stat().st_mtime_ns
    assert with_report(run, lambda: 0) == 0
    assert run.report.stat().st_mtime_ns == made
    os.utime(run.report, (NOW, NOW))  # as if the run had gone on since
    with_report(run, lambda: _work(run, "failed", 1))
    assert ">failed</b></h1>" in run.report.read_text()


def test_a_report_that_cannot_be_made_changes_nothing(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: RunFolder, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reporting, "write", fail)
    assert with_report(run, lambda: _work(run, "finished", 0)) == 0
    assert "no report was written" in run.console.read_text()


def test_a_disk_that_hangs_is_not_waited_for(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(reporting, "write", lambda run, path: hangs.wait(GIVE_UP_S))
    monkeypatch.setattr(reporting, "_AT_MOST_S", 0.05)
    began = time.monotonic()
    assert with_report(run, lambda: _work(run, "finished", 0)) == 0
    assert time.monotonic() - began < GIVE_UP_S / 2
    hangs.set()
    _join_report()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_asked_to_end_meanwhile_ends_as_the_run_did(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    hangs = threading.Event()

    def interrupted(run: RunFolder, path: Path) -> None:
        os.kill(os.getpid(), number)
        hangs.wait(GIVE_UP_S)

    before = signal.getsignal(number)
    monkeypatch.setattr(reporting, "write", interrupted)
    assert with_report(run, lambda: _work(run, "finished", 0)) == 0
    assert signal.getsignal(number) is before
    hangs.set()
    _join_report()


def _join_report() -> None:
    for thread in threading.enumerate():
        if thread.name == "report":
            thread.join(GIVE_UP_S)
