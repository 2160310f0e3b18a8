"""Trainer takes what people type: names, a DataLoader, an optimizer, a folder; else one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
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
        ({"optimizer": lambda parameters: None}, "the result of optimizer is of type NoneType"),
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
