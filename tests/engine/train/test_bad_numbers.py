"""Bad numbers in one process: what a skipped step cannot undo is said."""

import pytest
import torch
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.train.bad_numbers import BadNumbers
from torchmuster.train.data.step import MicroBatch

pytestmark = pytest.mark.engine

WORLD = made_up_world()


def test_a_bad_input_is_named_with_its_sample() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    inputs = torch.ones(4, 3)
    inputs[2] = float("nan")
    micro = MicroBatch(batch={"pixels": inputs}, samples=4, indices=[9, 8, 7, 6])
    found = BadNumbers(model, WORLD).examine(
        3, [micro], lambda model, batch: model(batch["pixels"]).mean()
    )
    assert "batch['pixels']" in found.what
    assert "samples of the dataset: 7" in found.why


def test_what_a_loss_does_not_use_is_not_blamed() -> None:
    model = nn.Linear(3, 1)
    mask = torch.full((2, 2), float("-inf"))
    masked = MicroBatch(batch=(torch.ones(2, 3), mask), samples=2)
    spoilt = MicroBatch(batch=(torch.ones(2, 3), torch.ones(2, 2)), samples=2)
    found = BadNumbers(model, WORLD).examine(
        0,
        [masked, spoilt],
        lambda model, batch: model(batch[0]).mean() / (1 if batch is masked.batch else 0),
    )
    assert "rank 0's loss function returned" in found.what
