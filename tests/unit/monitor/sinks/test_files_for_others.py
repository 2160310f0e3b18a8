"""What TensorBoard and readers of Parquet find in a run's folder, read by their own libraries."""

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


def test_parquet_has_what_the_lines_have(written: WrittenRun) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    written.steps(1, 2, loss=1.5, gradient_norm=None, samples=8)
    written.steps(3, loss=None, gradient_norm=None, samples=8)
    written.evaluations(3, accuracy=0.5)
    with (written.run.metrics / "steps.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # being written
    _sent(written, "parquet")
    table = parquet.read_table(written.run.metrics / "steps.parquet")
    assert table["step"].to_pylist() == [1, 2, 3]
    assert table["loss"].to_pylist() == [1.5, 1.5, None]
    assert str(table.schema.field("gradient_norm").type) == "double"
    assert str(table.schema.field("samples").type) == "int64"
    evaluations = parquet.read_table(written.run.metrics / "evaluations.parquet")
    assert evaluations["accuracy"].to_pylist() == [0.5]
    assert not [one for one in written.run.metrics.iterdir() if one.name.startswith(".")]


def test_parquet_is_written_as_a_run_goes_on_and_without_what_was_done_again(
    written: WrittenRun,
) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    path = written.run.metrics / "steps.parquet"
    sending = Sending(
        written.run, "parquet", lambda known: open_sink("parquet", written.run, Wanted(), known)
    )
    written.steps(*range(1, 999))
    sending.send_new()
    assert not path.exists(), "few lines are written at the end"
    written.steps(*range(999, 1001))
    sending.send_new()
    assert parquet.read_table(path).num_rows == 1000
    written.cut_off_after(10)
    written.steps(11, 12)
    sending.send_new(last=True)
    sending.close(finished=True)
    assert parquet.read_table(path)["step"].to_pylist() == list(range(1, 13))


def test_numbers_that_are_not_finite_are_kept_apart(written: WrittenRun) -> None:
    written.steps(1, loss=None)
    _sent(written, "tensorboard")
    ((step, loss),) = _curves(written)["train/loss"]
    assert step == 1
    assert math.isnan(loss)
