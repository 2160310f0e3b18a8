"""What a run says before its first step."""

from dataclasses import replace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.train.banner import banner
from torchmuster.train.data.loader import BatchLoader

pytestmark = pytest.mark.engine

WORLD = made_up_world(ranks=2)


def test_a_banner_fits_one_screen_and_says_what_will_be_computed(
    snapshot: SnapshotAssertion,
) -> None:
    model = nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 2))
    model[0].requires_grad_(False)
    text = banner(
        WORLD,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loader=BatchLoader(
            list(range(1000)), WORLD, micro_batch_size=8, global_batch_size=64, seed=5
        ),
        strategy="ddp: so that every rank has a copy",
        precision="fp32: it was asked for",
    )
    assert "1,302 parameters" in text
    threads = torch.get_num_threads()
    assert text.replace(f"{threads} thread{'s' * (threads > 1)}", "N threads") == snapshot


def test_a_rank_alone_is_told_as_it_is(
    snapshot: SnapshotAssertion,
) -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    alone = replace(WORLD, world_size=1, local_world_size=1)
    lines = banner(
        alone,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        loader=BatchLoader([1, 2, 3], alone, global_batch_size=8),
        strategy="",
        precision="",
    ).splitlines()
    assert "bfloat16" in lines[0]
    assert lines[0] == snapshot
    assert lines[1].startswith("ranks     1 rank, ")
    assert "gloo" not in lines[1]
