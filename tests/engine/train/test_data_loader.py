"""BatchLoader: what each rank reads of a map-style dataset. It needs no group, so ranks are made up."""

import random
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import Step

pytestmark = pytest.mark.engine


class Rows(Dataset[int]):
    """Counts what was read of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Noisy(Rows):
    """Draws from all three sources, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        numpy = pytest.importorskip("numpy")
        return index, random.random(), torch.rand(()).item(), numpy.random.rand()


def loaders(dataset: Any, ranks: int, **options: Any) -> list[BatchLoader]:
    return [BatchLoader(dataset, made_up_world(rank, ranks), **options) for rank in range(ranks)]


def read(step: Step) -> tuple[list[int], list[int]]:
    """Return the samples that count, and the number of each micro-batch's samples."""
    counted, sizes = [], []
    for micro in step:
        assert list(micro.batch) == list(micro.indices)
        assert len(micro.indices) == max(1, micro.samples)
        counted += list(micro.indices)[: micro.samples]
        sizes.append(micro.samples)
    return counted, sizes


def global_batches(per_rank: list[Any]) -> list[list[int]]:
    """Return the samples of each step over all ranks, sorted."""
    batches = []
    for steps in zip(*per_rank, strict=True):
        assert len({(one.epoch, one.number, one.rounds, one.samples) for one in steps}) == 1
        parts = [read(one) for one in steps]
        assert {len(sizes) for _, sizes in parts} == {steps[0].rounds}
        samples = sorted(sample for counted, _ in parts for sample in counted)
        assert len(samples) == steps[0].samples
        batches.append(samples)
    return batches


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 300),
    ranks=st.integers(1, 8),
    whole=st.integers(1, 64),
    micro=st.integers(1, 8),
    epoch=st.integers(0, 100),
    seed=st.integers(),
)
def test_each_sample_is_read_once_an_epoch_and_batches_do_not_depend_on_ranks(
    size: int, ranks: int, whole: int, micro: int, epoch: int, seed: int
) -> None:
    options = {"global_batch_size": whole, "seed": seed}
    together = loaders(Rows(size), ranks, micro_batch_size=micro, **options)
    batches = global_batches([one.epoch(epoch) for one in together])
    assert sorted(chain(*batches)) == list(range(size))
    assert len(batches) == together[0].steps_in_epoch()
    assert {len(batch) for batch in batches[:-1]} <= {whole}
    assert batches == global_batches([loaders(Rows(size), 1, **options)[0].epoch(epoch)])


def test_a_saved_position_goes_on_with_other_ranks_and_other_micro_batches() -> None:
    whole = {"global_batch_size": 12, "seed": 5}
    uninterrupted = global_batches([one.epoch(2) for one in loaders(Rows(100), 1, **whole)])
    before = loaders(Rows(100), 2, micro_batch_size=2, **whole)
    epochs = [one.epoch(2) for one in before]
    first = global_batches([islice(epoch, 4) for epoch in epochs])
    states = [one.state() for one in before]
    assert states == [{"epoch": 2, "sample": 48, "size": 100, "seed": 5, "shuffle": True}] * 2
    after = loaders(Rows(100), 3, micro_batch_size=3, **whole)
    for one in after:
        one.restore(states[0])
        assert one.state() == states[0]
    assert first + global_batches([one.epoch(2) for one in after]) == uninterrupted
    # The next epoch is read from its start, and so is the same one when it is asked for again.
    assert global_batches([one.epoch(2) for one in after]) == uninterrupted


def test_a_position_goes_on_with_another_global_batch_without_repeating_a_sample() -> None:
    before = BatchLoader(Rows(50), made_up_world(), global_batch_size=8)
    epoch = before.epoch(0)
    seen = read(next(epoch))[0] + read(next(epoch))[0]
    after = BatchLoader(Rows(50), made_up_world(), global_batch_size=10)
    after.restore(before.state())
    rest = [read(step)[0] for step in after.epoch(0)]
    assert [len(samples) for samples in rest] == [10, 10, 10, 4]
    assert sorted(chain(seen, *rest)) == list(range(50))


@pytest.mark.parametrize("other", [{"size": 101}, {"seed": 1}, {"shuffle": False}], ids=str)
def test_a_position_of_other_data_is_refused(other: dict[str, Any]) -> None:
    state = BatchLoader(Rows(100), made_up_world(), global_batch_size=8).state()
    dataset = Rows(other.pop("size", 100))
    loader = BatchLoader(dataset, made_up_world(), global_batch_size=8, **other)
    with pytest.raises(Impossible, match="the position was saved with"):
        loader.restore(state)


def test_the_tail_can_be_left_out() -> None:
    loader = BatchLoader(Rows(20), made_up_world(), global_batch_size=8, drop_tail=True)
    assert [step.samples for step in loader.epoch(0)] == [8, 8]
    assert loader.steps_in_epoch() == 2


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (Endless(), "BatchLoader cannot read Endless"),
        (iter([1]), "BatchLoader cannot read list_iterator"),
        ([], "the dataset is empty"),
    ],
)
def test_what_cannot_be_read_by_number_is_refused(dataset: Any, told: str) -> None:
    with pytest.raises(Impossible) as refused:
        BatchLoader(dataset, made_up_world(), global_batch_size=8)
    assert refused.value.what == told


def test_batches_are_those_of_torchs_dataloader() -> None:
    features, labels = torch.randn(50, 3), torch.randint(0, 5, (50,))
    pairs = [(features[place], labels[place]) for place in range(50)]
    for dataset in (TensorDataset(features, labels), pairs):
        ours = BatchLoader(dataset, made_up_world(), global_batch_size=8, shuffle=False)
        theirs: DataLoader[Any] = DataLoader(dataset, batch_size=8)  # type: ignore[arg-type]
        for step, expected in zip(ours.epoch(0), theirs, strict=True):
            (micro,) = step
            assert type(micro.batch) is type(expected) is list
            torch.testing.assert_close(micro.batch, expected, rtol=0, atol=0)
            assert [one.dtype for one in micro.batch] == [one.dtype for one in expected]


def test_a_sample_that_cannot_be_read_is_named() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise OSError("truncated")
            return index

    loader = BatchLoader(Broken(5), made_up_world(), global_batch_size=5)
    with pytest.raises(OSError, match="truncated") as failed:
        list(next(loader.epoch(0)))
    assert failed.value.__notes__ == ["while reading sample 3 of Broken"]


def test_workers_draw_other_numbers_on_every_rank_worker_and_epoch() -> None:
    def draws(loader: BatchLoader, epoch: int) -> list[tuple[float, ...]]:
        columns = [micro.batch[1:] for step in loader.epoch(epoch) for micro in step]
        return [row for own in columns for row in zip(*(one.tolist() for one in own), strict=True)]

    def noisy(rank: int) -> BatchLoader:
        return BatchLoader(Noisy(24), made_up_world(rank, 2), global_batch_size=8, workers=2)

    seen = []
    for rank in range(2):
        loader = noisy(rank)
        seen += draws(loader, 0) + draws(loader, 1)
        loader.close()
    assert len(seen) == 2 * 2 * 12
    for place in range(3):
        assert len({row[place] for row in seen}) == len(seen)
    resumed = noisy(1)  # an epoch's numbers do not depend on the epochs read before it
    assert draws(resumed, 1) == seen[-12:]
    resumed.close()


def test_workers_serve_many_epochs_also_after_one_was_left() -> None:
    random_state = torch.get_rng_state()
    loader = BatchLoader(Rows(30), made_up_world(), global_batch_size=4, workers=2)
    alone = BatchLoader(Rows(30), made_up_world(), global_batch_size=4)
    assert [read(step) for step in loader.epoch(0)] == [read(step) for step in alone.epoch(0)]
    left = loader.epoch(1)
    read(next(left))
    assert [read(step) for step in loader.epoch(2)] == [read(step) for step in alone.epoch(2)]
    with pytest.raises(RuntimeError, match="two epochs"):
        read(next(left))
    loader.close()
    assert torch.equal(torch.get_rng_state(), random_state)  # dropout stays as it would have been
