"""What TensorBoard finds in a run's folder, read by its own library."""

import math
from pathlib import Path
from typing import Any

import pytest

from torchmuster.monitor.sinks.sending import Sending
from torchmuster.monitor.sinks.sink import Wanted, open_sink
from unit.monitor.sinks.written_run import WrittenRun

pytestmark = pytest.mark.integrations


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path)


def _sent(written: WrittenRun, name: str, *, finished: bool = True) -> None:
    sending = Sending(
        written.run, name, lambda known: open_sink(name, written.run, Wanted(), known)
    )
    sending.send_new(last=True)
    sending.close(finished=finished)


def _curves(written: WrittenRun) -> dict[str, list[tuple[int, float]]]:
    accumulators: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    seen = accumulators.EventAccumulator(str(written.run.metrics / "tensorboard"))
    seen.Reload()
    return {
        tag: [(one.step, one.value) for one in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]
    }


def test_tensorboard_sees_every_step_once_after_a_restart(written: WrittenRun) -> None:
    written.steps(1, 2, 3, loss=1.0)
    written.evaluations(3, accuracy=0.25)
    _sent(written, "tensorboard", finished=False)
    written.cut_off_after(1)
    written.steps(2, 3, 4, loss=0.5)
    written.evaluations(3, accuracy=0.5)
    _sent(written, "tensorboard")
    curves = _curves(written)
    assert curves["train/loss"] == [(1, 1.0), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert curves["evaluation/accuracy"] == [(3, 0.5)]
    assert "train/verdict" not in curves
    assert "train/at_unix_s" not in curves


def test_tensorboard_shows_steps_at_the_time_they_were_made(written: WrittenRun) -> None:
    accumulators: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    written.steps(1, 2)
    _sent(written, "tensorboard")
    seen = accumulators.EventAccumulator(str(written.run.metrics / "tensorboard"))
    seen.Reload()
    first, second = (one.wall_time for one in seen.Scalars("train/loss"))
    assert second - first == 1.0
    assert first == pytest.approx(1_700_000_001)


def test_numbers_that_are_not_finite_are_kept_apart(written: WrittenRun) -> None:
    written.steps(1, loss=None)
    _sent(written, "tensorboard")
    ((step, loss),) = _curves(written)["train/loss"]
    assert step == 1
    assert math.isnan(loss)
