"""Seeds that differ where they should, and are the same everywhere else."""

import random
from dataclasses import replace

import numpy
import pytest
import torch

from made_up_worlds import made_up_world
from torchmuster.train.seeds import derive_seed, seed_everything

pytestmark = pytest.mark.engine

WORLD = made_up_world(ranks=2)


def test_a_derived_seed_never_changes() -> None:
    # Written down: runs are continued by other versions, on other machines.
    assert derive_seed(0) == 7210762507766007076
    assert derive_seed(42, "order", 3) == 1608119151863092300


def _draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_all_generators_differ_by_rank_and_epoch_and_repeat() -> None:
    drawn = []
    for rank, epoch in ((0, 0), (1, 0), (0, 1), (0, 0)):
        seed_everything(3, replace(WORLD, global_rank=rank), epoch=epoch)
        drawn.append(_draw())
    assert drawn[3] == drawn[0]
    for generator in zip(*drawn[:3], strict=True):
        assert len(set(generator)) == 3
