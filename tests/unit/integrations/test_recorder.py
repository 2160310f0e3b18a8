"""What a rank records of a script: steps, samples, logged numbers and saves, without torch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchmuster.integrations import recorder as recording
from torchmuster.integrations.recorder import Recorder
from torchmuster.integrations.torch_hooks import samples_of


class Clock:
    """Goes on when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Optimizer:
    """As much of an optimizer as is read."""

    def __init__(self, rate: float = 0.1) -> None:
        self.param_groups = [{"lr": rate}]


class Shaped:
    """As much of a tensor as is read of a batch."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


class Recorded:
    """A recorder with a clock of its own, and what it wrote."""

    def __init__(self, folder: Path, world_size: int = 1) -> None:
        self.path = folder / "rank-0.metrics.jsonl"
        self.clock = Clock()
        self.recorder = Recorder(self.path, world_size=world_size, clock=self.clock)

    def steps(
        self, count: int, optimizer: Optimizer, *, each_s: float = 0.1, samples: int = 4
    ) -> None:
        for _ in range(count):
            self.recorder.batch_read(1, each_s / 10, samples)
            self.clock.now_s += each_s
            self.recorder.optimizer_stepped(optimizer)

    def lines(self, file: str = "steps") -> list[dict[str, Any]]:
        self.recorder.flush()
        if not self.path.exists():
            return []
        lines = map(json.loads, self.path.read_text().splitlines())
        return [line for line in lines if line["file"] == file]


@pytest.fixture
def one(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path, world_size=2)


def test_a_logged_loss_comes_with_the_figures_of_its_steps(one: Recorded) -> None:
    one.steps(10, Optimizer(0.5))
    one.recorder.log({"loss": 2.5, "grad_norm": 1.25})
    (line,) = one.lines()
    assert (line["step"], line["loss"], line["gradient_norm"]) == (10, 2.5, 1.25)
    assert line["learning_rate"] == 0.5
    assert math.isclose(line["step_s"], 0.1)
    assert math.isclose(line["data_share"], 0.1)
    assert line["samples"] == 10 * 4 * 2  # of both ranks
    assert math.isclose(line["samples_per_s"], 80)


def test_an_evaluation_between_steps_is_not_part_of_a_step(one: Recorded) -> None:
    optimizer = Optimizer()
    one.steps(5, optimizer)
    one.recorder.batch_read(2, 0.0, 1000)  # the evaluation's loader
    one.clock.now_s += 60
    one.steps(5, optimizer)
    one.recorder.log({"loss": 1.0})
    (line,) = one.lines()
    assert math.isclose(line["step_s"], 0.1)
    assert line["samples"] == 10 * 4 * 2


def test_several_optimizers_of_one_step_count_once(one: Recorded) -> None:
    first, second = Optimizer(), Optimizer()
    for _ in range(3):
        one.recorder.optimizer_stepped(first)
        one.recorder.optimizer_stepped(second)
    assert one.recorder.step == 3


def test_a_resumed_script_counts_from_its_step(one: Recorded) -> None:
    one.recorder.begin_at(100)
    one.steps(2, Optimizer())
    assert one.recorder.step == 102
    one.recorder.log({"loss": 1.0}, step=202)
    assert one.recorder.step == 202


def test_a_script_that_logs_nothing_has_a_line_every_ten_seconds(one: Recorded) -> None:
    optimizer = Optimizer()
    one.steps(50, optimizer)
    one.recorder.beat()
    assert one.lines() == []
    one.steps(51, optimizer)
    one.recorder.beat()
    (line,) = one.lines()
    assert line["step"] == 101
    assert "loss" not in line


def test_the_first_step_alone_has_no_step_time(one: Recorded) -> None:
    """What came before it is the start of the script."""
    one.clock.now_s = 100
    one.steps(1, Optimizer())
    one.recorder.log({"loss": 1.0})
    assert "step_s" not in one.lines()[0]


def test_numbers_that_are_not_finite_are_null_and_other_values_are_left_out(one: Recorded) -> None:
    one.recorder.log({"loss": math.nan, "name": "run", "flag": True, "step": 7})
    (line,) = one.lines()
    assert line["loss"] is None
    assert not {"name", "flag"} & line.keys()
    assert line["step"] == 0


def test_saves_are_recorded_once_with_size_and_step(one: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"x" * 10)
    one.steps(3, Optimizer())
    one.recorder.file_saved(str(path), 0.25)
    one.recorder.file_saved(str(path), 0.25)
    (line,) = one.lines("saves")
    assert line["path"] == str(path)
    assert (line["step"], line["bytes"], line["stall_s"]) == (3, 10, 0.25)
    assert line["library"] == "torch.save"


def test_the_steps_before_a_save_are_written_with_it(tmp_path: Path) -> None:
    one = Recorded(tmp_path)
    one.steps(3, Optimizer())
    one.recorder.file_saved(str(tmp_path / "last.pt"), 0.1)
    assert [line["step"] for line in one.lines()] == [3]
    one.recorder.file_saved(str(tmp_path / "second.pt"), 0.1)
    assert len(one.lines()) == 1


def test_a_later_optimizer_goes_on_counting(one: Recorded) -> None:
    """A script may train in two stages, each with its own optimizer; the first is freed meanwhile."""
    one.steps(5, Optimizer())
    one.steps(5, Optimizer())
    assert one.recorder.step in (
        9,
        10,
    )  # its first step may have belonged to the last one of the first optimizer
    one.recorder.log({"loss": 1.0})
    (line,) = one.lines()
    assert math.isclose(line["step_s"], 0.1)


def test_a_checkpoint_that_is_saved_under_a_temporary_name_and_renamed(tmp_path: Path) -> None:
    one = Recorded(tmp_path)
    temporary, final = tmp_path / "last.tmp", tmp_path / "last.pt"
    temporary.write_bytes(b"weights")
    one.recorder.file_saved(str(temporary), 0.25)
    one.recorder.renamed("other.tmp", "other.pt")
    one.recorder.renamed(str(temporary), str(final))
    begun, renamed = one.lines("saves")
    assert begun["path"] == renamed["renamed_from"] == str(temporary)
    assert renamed["path"] == str(final)
    assert (renamed["bytes"], renamed["library"]) == (7, "torch.save")


def test_files_of_a_librarys_checkpoint_are_not_checkpoints(one: Recorded, tmp_path: Path) -> None:
    with one.recorder.library_saves():
        one.recorder.file_saved(str(tmp_path / "optimizer.pt"), 0.1)
    assert one.lines("saves") == []


def test_other_ranks_write_nothing() -> None:
    recorder = Recorder(None)
    recorder.optimizer_stepped(Optimizer())
    recorder.log({"loss": 1.0})
    recorder.saved("a", library="DCP")
    recorder.beat()
    recorder.end()
    assert recorder.step == 1


def test_log_does_nothing_without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "recorder", None)
    recording.log(loss=1.0)
    recording.log_evaluation(accuracy=1.0)


def test_an_iterator_is_not_read() -> None:
    batch = iter([Shaped(8, 3), Shaped(8)])
    assert samples_of(batch) == 0
    assert len(list(batch)) == 2


def test_a_tensor_that_cannot_be_copied_does_not_stop_the_script(one: Recorded) -> None:
    class Broken:
        def numel(self) -> int:
            return 1

        def detach(self) -> None:
            raise RuntimeError("no such device")

    one.recorder.log({"loss": Broken()})
    one.recorder.evaluated({"loss": Broken()})
    assert one.lines() == one.lines("evaluations") == []


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (Shaped(8, 3), 8),
        ((Shaped(8, 3), Shaped(8)), 8),
        ({"names": ["a"], "input_ids": Shaped(4, 128)}, 4),
        (["a", "b"], 0),
        ("text", 0),
        (Shaped(), 0),
        (None, 0),
        (object(), 0),
    ],
)
def test_samples_of_a_batch(batch: object, samples: int) -> None:
    assert samples_of(batch) == samples
