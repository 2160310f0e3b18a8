"""What datasets draw while they are read does not depend on where reading began."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from made_up_worlds import made_up_world
from torchmuster.train.data.loader import BatchLoader

pytestmark = pytest.mark.engine

WORLD = made_up_world()


class Drawing:
    """Samples that are random numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


def batches(loader: Any, epoch: int, begin: int) -> list[torch.Tensor]:
    if begin:
        position = {**loader.state(), "epoch": epoch, "sample": begin * 4}
        loader.restore(position)
    try:
        return [micro.batch for step in loader.epoch(epoch) for micro in step]
    finally:
        loader.close()


def test_workers_draw_the_same_after_a_resume_in_the_middle_of_an_epoch() -> None:
    def loader(workers: int) -> BatchLoader:
        return BatchLoader(
            Drawing(), WORLD, global_batch_size=4, micro_batch_size=2, workers=workers
        )

    whole = batches(loader(2), 1, 0)
    rest = batches(loader(1), 1, 3)  # another number of workers: it does not matter either
    assert len(rest) == 6
    assert torch.equal(torch.stack(rest), torch.stack(whole[6:]))
    drawn = torch.stack(whole)[..., 1:].flatten().tolist()
    assert len(set(drawn)) == len(drawn)
    assert not torch.equal(torch.stack(batches(loader(2), 2, 0)), torch.stack(whole))
