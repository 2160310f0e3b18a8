"""A run on one screen, whatever its size and the terminal's."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from torchmuster.launch import node_ranks
from torchmuster.launch.hangs.pulse import Pulse
from torchmuster.monitor.views.run_picture import Curve, RunPicture, RunWatch
from torchmuster.monitor.views.run_screen import screen
from torchmuster.runfolder import RunFolder, create, write_atomically
from unit.monitor.test_collecting import LINE, NOW


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create(tmp_path / "runs", "llm")
    _state(run, "running")
    return run


def _state(run: RunFolder, phase: str, headline: str = "") -> None:
    content = {"phase": phase, "since_unix_s": NOW - 10, "started_unix_s": NOW - 100}
    write_atomically(run.state, json.dumps({**content, "headline": headline}))


def _lines(run: RunFolder, count: int = 10) -> None:
    lines = [
        LINE | {"step": 10 * at, "loss": 10.0 / at, "samples_per_s": 600.0 + at, "skipped_steps": 0}
        for at in range(1, count + 1)
    ]
    path = run.metrics / "steps.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    os.utime(path, (NOW, NOW))


def _ranks(run: RunFolder, count: int, *, slow: int | None = None, silent_s: float = 0.0) -> None:
    pulses = tuple(
        Pulse(
            rank=rank,
            pid=rank,
            beat=1,
            moves=1,
            data_share=0.1,
            communication_share=0.0 if rank == slow else 0.4,
            silent_s=silent_s,
        )
        for rank in range(count)
    )
    content = node_ranks.NodeRanks(host="a", attempt=0, at_unix_s=NOW, ranks=pulses)
    (run.metrics / "ranks-from-0.json").write_bytes(msgspec.json.encode(content))


def _look(run: RunFolder) -> RunPicture:
    return RunWatch(run).look(NOW)


def _shown(run: RunFolder, width: int = 80) -> str:
    return screen(_look(run), width).plain


def test_before_the_first_step(run: RunFolder) -> None:
    assert "llm  running  1 min" in _shown(run)
    assert "no step yet" in _shown(run)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_everything_fits(run: RunFolder, width: int, ranks: int) -> None:
    _lines(run)
    _ranks(run, ranks)
    shown = _shown(run, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "step 100  epoch 0  loss 1.0000  lr 0.0001  610.0 samples/s  2,000.0 ms/step" in shown
    assert "█ compute 60%  ▓ communication 20%  ▒ data 10%  ░ checkpoint 10%" in shown
    assert f"ranks {ranks}: how much each waits" in shown
    assert shown.count("▒") >= ranks, "a place for each rank's waiting"
    assert "alerts none" in shown


def test_the_curve_falls_with_the_loss(run: RunFolder) -> None:
    _lines(run)
    lines = _shown(run).splitlines()
    (top,) = [line for line in lines if line.startswith("          10 ")]
    assert top[13] != "⠀"
    assert top.endswith("⠀")


def test_the_slow_rank_is_named(run: RunFolder) -> None:
    _lines(run)
    _ranks(run, 8, slow=5)
    assert "the others wait for rank 5" in _shown(run)
    _ranks(run, 8)
    assert "the others wait" not in _shown(run)


def test_ranks_in_which_python_does_not_run(run: RunFolder) -> None:
    _ranks(run, 12, silent_s=40.0)
    assert "Python does not run in rank 0, 1, 2, 3, 4, 5, 6, 7 …" in _shown(run)


def test_a_run_that_failed(run: RunFolder) -> None:
    _state(run, "failed", "rank 1: ValueError: \x1b[2Jbad\nmore")
    shown = _shown(run)
    assert "rank 1: ValueError: \N{REPLACEMENT CHARACTER}[2Jbad" in shown
    assert "critical llm: run " in shown
    assert f"fix muster explain {run.id}" in shown
    picture = _look(run)
    assert picture.is_over
    assert [one.alert.name for one in picture.news] == ["MusterRunFailed"]


def test_a_curve_keeps_its_shape_however_long_it_gets() -> None:
    made = Curve()
    for value in range(100_000):
        made.add(value)
    assert len(made.values) < 4096
    assert made.values == sorted(made.values)
    assert made.values[-1] > 99_000
