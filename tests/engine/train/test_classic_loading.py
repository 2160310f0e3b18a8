"""The classic DataLoader: which samples come, in which order, and what its workers draw."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import Dataset

from torchmuster.distributed import create_distributed_dataloader
from torchmuster.errors import Impossible

pytestmark = pytest.mark.engine


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def batches(size: int, batch_size: int, ranks: int, **options: Any) -> list[list[list[int]]]:
    """Return each rank's batches of one epoch."""
    return [
        [
            batch.tolist()
            for batch in create_distributed_dataloader(
                Numbers(size), batch_size, rank, ranks, **options
            )
        ]
        for rank in range(ranks)
    ]


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 7),
    seed=st.integers(),
)
def test_in_training_no_sample_comes_twice_and_batches_are_equally_many(
    size: int, batch_size: int, ranks: int, seed: int
) -> None:
    if size < ranks:
        return
    dealt = batches(size, batch_size, ranks, seed=seed)
    assert len({len(of_rank) for of_rank in dealt}) == 1
    seen = [sample for of_rank in dealt for batch in of_rank for sample in batch]
    assert len(seen) == len(set(seen))
    left_out = size % (batch_size * ranks)
    assert len(seen) == (size - left_out if left_out < ranks else size)
    # The ranks' n-th batches together are the n-th batch of one process.
    alone = batches(size, batch_size * ranks, 1, seed=seed)[0] if len(seen) == size else []
    for number, batch in enumerate(alone):
        assert sorted(batch) == sorted(sample for of_rank in dealt for sample in of_rank[number])


@settings(max_examples=30, deadline=None)
@given(size=st.integers(0, 60), batch_size=st.integers(1, 5), ranks=st.integers(1, 7))
def test_in_evaluation_every_sample_comes_once(size: int, batch_size: int, ranks: int) -> None:
    dealt = batches(size, batch_size, ranks, shuffle=False)
    assert sorted(sample for one in dealt for batch in one for sample in batch) == list(range(size))


def test_epochs_change_by_themselves_and_can_be_set() -> None:
    loader = create_distributed_dataloader(Numbers(20), 4, 0, 2)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert first != second
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert torch.cat(list(loader)).tolist() == first
    assert torch.cat(list(loader)).tolist() == second
    other = create_distributed_dataloader(Numbers(20), 4, 0, 2, seed=1)
    assert torch.cat(list(other)).tolist() != first


def test_fewer_samples_than_ranks_are_refused_in_training(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match="3 samples") as refused:
        create_distributed_dataloader(Numbers(3), 1, 0, 4)
    assert refused.value == snapshot


class Draws(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(()).item(), random.random()])


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch() -> None:
    def drawn(rank: int, epoch: int) -> list[float]:
        torch.manual_seed(0)
        loader = create_distributed_dataloader(Draws(4), 1, rank, 2, num_workers=1)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        return torch.cat(list(loader)).flatten().tolist()

    draws = [drawn(0, 0), drawn(1, 0), drawn(0, 1)]
    assert len({number for one in draws for number in one}) == 12
    assert drawn(1, 0) == draws[1]
