"""Whatever becomes of a run's report, the run's end is what it was."""

import os
import signal
from pathlib import Path

import pytest

from made_up_runs import a_run, add_lines, set_state
from torchmuster.cli import reporting
from torchmuster.cli.reporting import with_report
from torchmuster.runfolder import RunFolder

NOW = 1_000_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
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


def test_a_run_that_is_not_over_leaves_none(run: RunFolder) -> None:
    assert with_report(run, lambda: 3) == 3
    assert not run.report.exists()


def test_a_report_that_cannot_be_made_changes_nothing(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: RunFolder, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reporting, "write", fail)
    assert with_report(run, lambda: _work(run, "finished", 0)) == 0
    assert "no report was written" in run.console.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_asked_to_end_meanwhile_ends_as_the_run_did(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupted(run: RunFolder, path: Path) -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(reporting, "write", interrupted)
    assert with_report(run, lambda: _work(run, "finished", 0)) == 0
    assert signal.getsignal(number) is before
