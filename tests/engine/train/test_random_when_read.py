"""What datasets draw while they are read does not depend on where reading began."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from made_up_worlds import made_up_world
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.stream import StreamLoader

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


class Lanes:
    """A source of two lanes whose samples are random numbers; reading goes on from a number."""

    def lanes(self) -> int:
        return 2

    def identity(self) -> str:
        return "made up"

    def open(self, lanes: Any, *, epoch: int, cursors: Any) -> dict[int, "Lane"]:
        return {lane: Lane(lane, (cursors.get(lane) or {"at": 0})["at"]) for lane in lanes}


class Lane:
    """One of them."""

    def __init__(self, lane: int, at: int) -> None:
        self._lane, self._at = lane, at

    def read(self, count: int) -> list[torch.Tensor]:
        count = min(count, 12 - self._at)
        self._at += count
        return [torch.tensor([self._lane, random.random(), np.random.rand()]) for _ in range(count)]

    def cursor(self) -> dict[str, int]:
        return {"at": self._at}

    def close(self) -> None: ...


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_draws_the_same_and_leaves_the_training_s_numbers_alone(
    workers: int,
) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(Lanes(), WORLD, global_batch_size=3, block=4, workers=workers)

    whole_loader = loader()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    whole, states = [], []
    for step in whole_loader.epoch(0):
        whole += [micro.batch for micro in step]
        states.append(whole_loader.state())
    assert torch.equal(torch.rand(3), expected)
    resumed = loader()
    resumed.restore(states[2])
    rest = [micro.batch for step in resumed.epoch(0) for micro in step]
    assert torch.equal(torch.cat(rest), torch.cat(whole[3:]))
    drawn = torch.cat(whole)[:, 1:].flatten().tolist()
    assert len(set(drawn)) == len(drawn)
