"""Trainer in one process: when it ends, what it prints and writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible, OutOfMemory
from torchmuster.train import reports
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.optimizers import schedule
from torchmuster.train.reports import Reports
from torchmuster.train.step_line import StepRecord
from torchmuster.train.trainer import Evaluation, Trainer

pytestmark = pytest.mark.engine

WORLD = made_up_world()


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def make(**how: Any) -> Trainer:
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": squares,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "data": BatchLoader(
            [torch.ones(3) * n / 20 for n in range(20)], WORLD, global_batch_size=8
        ),
        "reports": Reports(WORLD, quiet=True),
    }
    return Trainer(**{"world": WORLD, **parts, **how})


@pytest.fixture
def lines_by_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow step on a busy machine make no line of its own."""
    monkeypatch.setattr(reports, "_SILENT_AT_MOST_S", 1e9)


@pytest.mark.usefixtures("lines_by_steps_alone")
def test_a_run_prints_its_banner_once_and_then_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(reports=Reports(WORLD, log_every=3))
    trainer.fit(epochs=1)
    trainer.fit(epochs=2)
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split("|")[0].strip() for line in lines]
    banner = [line.split()[0] for line in lines[:4]]
    assert banner == ["model", "batch", "strategy", "precision"]
    assert lines[2].startswith("strategy  single: ")
    assert [one for one in starts if one.startswith("step ")] == [
        "step 1/3",
        "step 3/3",
        "step 6/6",
    ]


def test_an_end_is_asked_for_and_kept_to(snapshot: SnapshotAssertion) -> None:
    trainer = make()
    with pytest.raises(Impossible) as told:
        trainer.fit()
    assert "epochs=… or steps=…" in told.value.why + told.value.fix
    assert told.value == snapshot
    trainer.fit(epochs=1)
    assert (trainer.epoch, trainer.step) == (1, 3)
    trainer.fit(steps=5)
    assert (trainer.epoch, trainer.step) == (1, 5)
    trainer.fit(steps=5)
    trainer.fit(epochs=3)
    assert (trainer.epoch, trainer.step) == (3, 9)
    trainer.fit(epochs=9, steps=12)
    assert (trainer.epoch, trainer.step) == (4, 12)


def test_pieces_after_a_change_of_the_batch_size_read_each_sample_once() -> None:
    read: list[int] = []

    def noting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        read.extend(batch[:, 0].int().tolist())
        return squares(model, batch)

    def reading(batch_size: int) -> Trainer:
        data = [torch.full((3,), float(n)) for n in range(33)]
        loader = BatchLoader(data, WORLD, global_batch_size=batch_size)
        return make(
            loss=noting,
            data=loader,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        )

    before = reading(5)
    before.fit(steps=3)
    trainer = reading(8)
    trainer.restore(before.state())
    trainer.fit(steps=4)
    list(trainer.loader.epoch(0))  # that somebody else reads with it moves nothing
    assert trainer.state()["progress"]["loader"]["sample"] == 23
    trainer.fit(steps=5)
    trainer.fit(steps=6)
    assert sorted(read) == list(range(33))
    assert (trainer.epoch, trainer.step) == (1, 6)
    trainer.fit(epochs=1)
    assert len(read) == 33


def test_the_first_weights_are_those_of_the_seed() -> None:
    first, again, other = (
        make(seed=seed, reports=Reports(WORLD)).model.get_parameter("weight") for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_must_be_kept_besides_tensors_is_plain_json() -> None:
    records: list[StepRecord] = []
    reports = Reports(WORLD, quiet=True, log_every=1, on_record=[records.append])
    falls = {"schedule": lambda optimizer: schedule(optimizer, "linear", total_steps=9)}
    trainer = make(**falls, reports=reports)
    trainer.fit(steps=4)
    state = trainer.state()
    assert json.loads(json.dumps(state["progress"])) == state["progress"]
    other = make(**falls, reports=reports)
    other.restore(state)
    other.fit(steps=6)
    assert [one.step for one in records] == [1, 2, 3, 4, 5, 6]
    # Each line has the rate of its own step, not that of the next.
    rates = [0.01 * (9 - done) / 9 for done in range(6)]
    assert [one.learning_rate for one in records] == pytest.approx(rates)


def test_evaluations_come_after_epochs_or_every_so_many_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = BatchLoader([torch.ones(3)] * 5, WORLD, global_batch_size=2)

    def measure(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not model.training
        return {"size": model(batch).abs()[:, 0]}

    for every, folder in ((None, "epochs"), (2, "steps")):
        trainer = make(
            evaluation=Evaluation(loader=held_out, measure=measure, every=every),
            reports=Reports(WORLD, folder=tmp_path / folder),
        )
        trainer.fit(epochs=2)
        assert trainer.model.training
    lines = {
        folder: [json.loads(line) for line in file.read_text().splitlines()]
        for folder in ("epochs", "steps")
        for file in [tmp_path / folder / "metrics" / "evaluations.jsonl"]
    }
    assert [(one["step"], one["epoch"]) for one in lines["epochs"]] == [(3, 0), (6, 1)]
    assert [one["step"] for one in lines["steps"]] == [2, 4, 6]
    size = lines["steps"][0]["size"]
    assert f"evaluation after step 2: size {size:.4g}" in capsys.readouterr().out


def test_a_record_that_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    def overflowing(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum() + torch.tensor(3e38) * 2, 8

    trainer = make(loss=overflowing, reports=Reports(WORLD, quiet=True, folder=tmp_path))
    trainer.fit(steps=1)
    (line,) = (tmp_path / "metrics" / "steps.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] is None


def test_running_out_of_memory_shows_the_memory_table() -> None:
    def too_large(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    with pytest.raises(OutOfMemory) as told:
        make(loss=too_large).fit(steps=1)
    assert "parameters" in str(told.value)
