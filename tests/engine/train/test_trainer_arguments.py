"""Trainer takes what people type: names, a DataLoader, an optimizer, a folder; else one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.reports import Reports
from torchmuster.train.trainer import Trainer
from torchmuster.train.world import join_world

pytestmark = pytest.mark.engine

WORLD = made_up_world()
POINTS = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
DATASET = TensorDataset(POINTS, POINTS.argmax(1))


def trainer(**changed: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    parts: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "data": DataLoader(DATASET, batch_size=16),
        "world": WORLD,
        "reports": Reports(WORLD, quiet=True),
    }
    return Trainer(**{**parts, **changed})


def test_the_same_steps_whatever_form_the_arguments_have() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    losses = []
    for changed in (
        {},
        {"loss": "cross_entropy"},
        {"loss": loss},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5)},
        {"strategy": "single", "precision": "fp32"},
        {"strategy": "ddp", "precision": "32"},
    ):
        with join_world("cpu") as world:
            last = trainer(**{"world": world, **changed}).fit(epochs=3)
        assert last is not None
        losses.append(last.loss)
    assert len(set(losses)) == 1


def test_a_dataset_with_a_batch_size_and_a_folder_of_checkpoints(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": DATASET, "batch_size": 16, "checkpoints": tmp_path / "saved"}
    with join_world("cpu") as world:
        trainer(**options, world=world).fit(steps=3)
        again = trainer(**options, world=world)
        again.resume()
    assert again.step == 3


OTHER = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"strategy": "dpp"}, "strategy is 'dpp', but must be one of auto, single, ddp, fsdp"),
        ({"precision": "bf61"}, "unknown precision 'bf61'"),
        ({"precision": 16}, "precision is of type int, but must be auto, fp32, bf16 or fp16"),
        ({"data": 7}, "data is of type int, but must be a DataLoader"),
        ({"data": DATASET}, r"data is a dataset \(TensorDataset\), but there is no batch size"),
        ({"optimizer": "adam"}, "optimizer is 'adam', but must be an optimizer"),
        ({"optimizer": OTHER}, r"optimizer \(SGD\) has parameters that model does not have"),
        (
            {"model": lambda: nn.Linear(4, 4)},
            "optimizer is an instance of SGD, but model is a function",
        ),
        ({"model": "resnet"}, "model is 'resnet', but must be a torch.nn.Module"),
        ({"loss": "mse"}, "loss='mse' is not a known loss"),
        ({"checkpoints": 3}, "checkpoints is of type int, but must be a folder"),
    ],
)
def test_a_wrong_argument_is_named_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Impossible, match=sentence):
        trainer(**changed)


TARGETS = torch.arange(64) % 4
CRITERIA: dict[str, nn.Module] = {
    "plain": nn.CrossEntropyLoss(),
    "ignoring": nn.CrossEntropyLoss(ignore_index=0),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5, 2.0])),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_weighs_as_it_would_on_the_whole_batch(name: str) -> None:
    """In micro-batches with unequal numbers of counted targets."""
    targets = TARGETS.sort().values
    criterion = CRITERIA[name]
    losses = []
    for micro_batch_size in (64, 6):
        loader = BatchLoader(
            TensorDataset(POINTS, targets),
            WORLD,
            global_batch_size=64,
            micro_batch_size=micro_batch_size,
        )
        made = trainer(loss=criterion, data=loader)
        record = made.fit(steps=2)
        assert record is not None
        losses.append((record.loss, made.model.get_parameter("weight").detach()))
    (loss, weight), (loss_of_parts, weight_of_parts) = losses
    assert loss_of_parts == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(weight, weight_of_parts, atol=1e-6)
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        total = criterion(plain(POINTS), targets)
        (total / 64 if name == "sum" else total).backward()
        optimizer.step()
    assert torch.allclose(weight, plain.weight, atol=1e-6)


def test_the_weights_of_a_criterion_move_to_the_device() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # as far as tests without a GPU can show
        trainer(loss=criterion)
