"""A run on one screen, whatever its size and the terminal's."""

from pathlib import Path

import pytest

from made_up_runs import NOW, a_run, add_lines, add_ranks, set_state
from script_checkpoints import record, torch_file
from torchmuster.launch.history import run_state
from torchmuster.monitor.views.run_picture import RunPicture, RunWatch
from torchmuster.monitor.views.run_screen import run_screen
from torchmuster.runfolder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return a_run(tmp_path)


def _look(run: RunFolder) -> RunPicture:
    return RunWatch(run).look(NOW)


def _shown(run: RunFolder, width: int = 80) -> str:
    return run_screen(_look(run), width).plain


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_everything_fits(run: RunFolder, width: int, ranks: int) -> None:
    add_lines(run)
    add_ranks(run, ranks)
    shown = _shown(run, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "610.0 samples/s  2,000.0 ms/step" in shown
    assert "█ compute 60%  ▓ communication 20%  ▒ data 10%  ░ checkpoint 10%" in shown
    assert f"ranks {ranks}: share of time waiting" in shown
    assert shown.count("▒") >= ranks, "a place for each rank's waiting"
    assert "alerts none" in shown


def test_a_reported_hang_is_shown_until_it_is_over(run: RunFolder) -> None:
    add_lines(run)
    run_state.log_event(run, run_state.HANG, what="rank 1 on a keeps the others waiting")
    shown = _shown(run, 120)
    assert "hang rank 1 on a keeps the others waiting" in shown
    assert "alerts none" not in shown
    run_state.log_event(run, run_state.HANG_OVER, what="rank 1 continues")
    assert "keeps the others waiting" not in _shown(run, 120)


def test_a_script_that_no_longer_saves_is_told(run: RunFolder, tmp_path: Path) -> None:
    path = torch_file(tmp_path / "last.pt")
    record(run, path, 10, library="torch.save", at_unix_s=NOW)
    watch = RunWatch(run)
    old = []
    for after_s in range(10_200, 12_000, 300):
        alerts = watch.look(NOW + after_s).alerts
        if any(news.alert.name == "MusterCheckpointOld" for news in alerts):
            old.append(after_s)
    assert old[0] == 11_400  # over 3 h, and then for 5 minutes
    record(run, path, 50, library="torch.save", at_unix_s=NOW + 12_000)
    assert watch.look(NOW + 12_001).alerts == []


def test_the_slow_rank_is_named(run: RunFolder) -> None:
    add_lines(run)
    add_ranks(run, 8, slow=5)
    assert "the other ranks wait for rank 5" in _shown(run)
    add_ranks(run, 8)
    assert "the others wait" not in _shown(run)


def test_a_run_that_failed(run: RunFolder) -> None:
    set_state(run, "failed", "rank 1: ValueError: \x1b[2Jbad\nmore")
    shown = _shown(run)
    assert "rank 1: ValueError: \N{REPLACEMENT CHARACTER}[2Jbad" in shown
    assert "critical llm: run " in shown
    assert f"fix muster explain {run.id}" in shown
    picture = _look(run)
    assert picture.is_over
    assert [one.alert.name for one in picture.news] == ["MusterRunFailed"]
