"""Gather shards, and write them."""

import os
from pathlib import Path

import pytest
import torch

from made_up_worlds import made_up_world
from torchmuster.train import weights

pytestmark = pytest.mark.engine


def test_written_weights_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        weights.write_files(
            tmp_path,
            iter([("weight", torch.ones(2))]),
            {"model.safetensors": ["weight"]},
        )
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_copies_weights_to_the_host(rank: int) -> None:
    weight = torch.ones(2)
    (pair,) = weights._whole_tensors({"weight": weight}, ["weight"], made_up_world(rank, 2))
    assert (pair[1].data_ptr() == weight.data_ptr()) is (rank == 1)
