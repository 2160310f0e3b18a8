"""The classic trainers in one process without a group, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvml_stub import scenarios
from rank_programs.classic import adam, dataset, network, weights
from torchmuster.distributed import (
    DDPTrainer,
    ProductionTrainer,
    create_distributed_dataloader,
    reduce_mean,
    sync_gradients,
)
from torchmuster.errors import Impossible
from torchmuster.train import seeds
from torchmuster.train.legacy.data import present_world

pytestmark = pytest.mark.engine


def loader(samples: int = 8, **options: Any) -> Any:
    return create_distributed_dataloader(dataset(samples), 4, **options)


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    trainer = DDPTrainer(network(), 0, 1)
    optimizer = adam(trainer.model)
    losses = [trainer.train_epoch(loader(), optimizer, nn.CrossEntropyLoss()) for _ in range(20)]
    assert losses[-1] < losses[0]
    trainer.save_checkpoint(tmp_path / "a", 19, optimizer)
    other = DDPTrainer(network(), 0, 1)
    assert other.load_checkpoint(tmp_path / "a") == 19
    assert weights(other.model) == weights(trainer.model)
    assert reduce_mean(2.5) == 2.5
    assert reduce_mean(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    sync_gradients(trainer.model)


def test_ranks_without_a_group_are_refused() -> None:
    with pytest.raises(Impossible) as refused:
        DDPTrainer(network(), 1, 4)
    assert "rank 1 of 4" in refused.value.what
    assert "setup_distributed(rank, world_size)" in refused.value.fix


def test_a_step_with_bad_numbers_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = DDPTrainer(network(), 0, 1)
    before = weights(trainer.model)

    def bad(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.mean() * float("nan")

    assert trainer.train_epoch(loader(), adam(trainer.model), bad) != 0.0
    assert "2 of 2 steps" in caplog.messages[-1]
    assert weights(trainer.model) == before


def test_curves_hold_what_the_gpus_say(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    machine(scenarios.eight_a100_idle())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    written: dict[str, float] = {}
    config = {"epochs": 1, "tensorboard_folder": tmp_path, "precision": "fp32", "log_every": 1}
    trainer = ProductionTrainer(network(), loader(), None, config)
    monkeypatch.setattr(
        trainer._writer, "add_scalar", lambda name, number, step: written.update({name: number})
    )
    trainer.train_epoch(0)
    trainer.close()
    assert {"gpu 0/utilization_percent", "gpu 3/used_memory_mb"} <= written.keys()
    assert not any(name.startswith("gpu 1/") for name in written)
    assert written["gpu 3/temperature_c"] > 0
    assert {"train/loss", "train/learning_rate", "train/loss of the epoch"} <= written.keys()


def test_random_numbers_go_on_where_they_were() -> None:
    import random

    import numpy

    world = present_world()
    kept = seeds.save_random_states(world)

    def draw() -> list[float]:
        return [random.random(), random.gauss(), torch.rand(()).item(), float(numpy.random.rand())]

    first = draw()
    assert draw() != first
    seeds.load_random_states(kept, world)
    assert draw() == first
