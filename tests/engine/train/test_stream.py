"""Streams: each sample once, the same steps for any number of ranks, and a position to go on from."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import IterableDataset, get_worker_info

from made_up_worlds import made_up_world
from rank_programs.streaming import Batches, as_values, together
from rank_programs.streaming import given as given_out
from ranks_in_lockstep import run_in_lockstep
from torchmuster.errors import Impossible
from torchmuster.train.data.step import Loader
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.streams.iterable import Indexed, Iterables
from torchmuster.train.data.streams.reading import Source, round_order, shard_owners
from torchmuster.train.world import World

pytestmark = pytest.mark.engine


class Lists:
    """A source of lanes of any lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def lanes(self) -> int:
        return len(self._lengths)

    def identity(self) -> str:
        return f"lists of {self._lengths}"

    def open(self, lanes: Any, *, epoch: int, cursors: Any) -> dict[int, "ListLane"]:
        return {
            lane: ListLane(
                [1000 * lane + one for one in range(self._lengths[lane])], cursors.get(lane) or 0
            )
            for lane in lanes
        }


class ListLane:
    def __init__(self, samples: list[int], at: int) -> None:
        self._samples, self._at = samples, at

    def read(self, count: int) -> list[int]:
        self._at += count
        return self._samples[self._at - count : self._at]

    def cursor(self) -> int:
        return self._at

    def close(self) -> None:
        pass


def loader(source: Source, world: World, **arguments: Any) -> StreamLoader:
    arguments = {"global_batch_size": 8, "block": 3, **arguments}
    return StreamLoader(source, world, collate=as_values, **arguments)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(any),
    ranks=st.integers(1, 4),
    batch=st.integers(1, 9),
    micro=st.integers(1, 4),
    block=st.integers(1, 5),
    stop=st.integers(0, 12),
)
@pytest.mark.filterwarnings("ignore:the data has")
def test_each_sample_once_in_the_same_steps_for_any_lanes_and_ranks(
    lengths: list[int], ranks: int, batch: int, micro: int, block: int, stop: int
) -> None:
    source = Lists(lengths)
    sizes = {"global_batch_size": batch, "micro_batch_size": micro, "block": block}
    alone = together([given_out(loader(source, made_up_world(), **sizes).epoch(0))])
    everything = [1000 * lane + one for lane, count in enumerate(lengths) for one in range(count)]
    assert sorted(itertools.chain(*alone)) == everything
    assert [len(step) for step in alone[:-1]] == [batch] * (len(alone) - 1)

    def stop_and_go_on(world: World) -> tuple[Batches, dict[str, Any]]:
        first = loader(source, world, **sizes)
        return given_out(itertools.islice(first.epoch(0), stop)), first.state()

    before = run_in_lockstep(ranks, stop_and_go_on)
    assert together([steps for steps, _ in before]) == alone[:stop]
    state = json.loads(json.dumps(before[0][1]))
    assert all(one == before[0][1] for _, one in before)

    def go_on(world: World) -> Batches:
        second = loader(source, world, **sizes)
        second.restore(state)
        return given_out(second.epoch(0))

    after = run_in_lockstep(ranks % 4 + 1, go_on)  # another number of ranks
    if state["epoch"] == 0:
        assert together(after) == alone[stop:]
    else:
        assert together(after) == alone, "the epoch was over; asked for again, it begins again"


def test_ranks_without_lanes_take_part_with_a_sample_that_counts_nothing() -> None:
    def program(world: World) -> list[tuple[int, list[Any]]]:
        loading = StreamLoader(Lists([5]), world, global_batch_size=2)
        return [
            (micro.samples, micro.batch.tolist()) for step in loading.epoch(0) for micro in step
        ]

    with pytest.warns(UserWarning, match="1 lanes for 3 ranks: 2 ranks stay idle"):
        first, *others = run_in_lockstep(3, program)
    assert [samples for samples, _ in first] == [1, 1, 1, 1, 1]
    assert others == [[(0, [0])] * 5] * 2


def test_lanes_go_round_and_dry_ones_drop_out() -> None:
    assert round_order([3, 1, 2]) == [0, 1, 2, 0, 2, 0]
    assert shard_owners(6, 3) == [0, 1, 2, 0, 1, 2]


def test_shuffling_is_by_block_and_epoch_and_can_be_left_out() -> None:
    source = Lists([9])
    plain = given_out(loader(source, made_up_world(), shuffle=False).epoch(0))
    assert [one for _, _, micros in plain for micro in micros for one in micro] == list(range(9))
    shuffled = loader(source, made_up_world(), global_batch_size=3)
    epochs = [together([given_out(shuffled.epoch(epoch))]) for epoch in range(2)]
    assert epochs[0] == epochs[1] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    orders = {
        str(given_out(loader(source, made_up_world(), seed=seed).epoch(0))) for seed in range(5)
    }
    assert len(orders) > 1


def test_begin_leaves_out_steps_and_a_second_epoch_call_begins_anew() -> None:
    loading = loader(Lists([7, 4]), made_up_world())
    all_steps = given_out(loading.epoch(0))
    assert given_out(loading.epoch(0, begin=1)) == all_steps[1:]
    assert given_out(loading.epoch(0)) == all_steps
    assert loading.state()["epoch"] == 1
    assert loading.steps_in_epoch() is None
    typed: Loader = loading
    assert typed is loading


def test_a_position_of_other_data_is_refused(snapshot: SnapshotAssertion) -> None:
    state = loader(Lists([5]), made_up_world()).state()
    with pytest.raises(Impossible) as refused:
        loader(Lists([6]), made_up_world(), seed=1).restore(state)
    assert "seed was 0, but is 1" in refused.value.what
    assert refused.value == snapshot


class DividesItself(IterableDataset[tuple[torch.Tensor, int]]):
    """A well-behaved dataset, which gives each loader worker another part."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for one in range(first, 50, step):
            yield torch.full((2, 3), one), one


def test_workers_read_the_same_and_leave_the_random_numbers_alone() -> None:
    numbers = random.getstate(), torch.get_rng_state()
    read = []
    for workers in (0, 2):
        loading = StreamLoader(
            Iterables(DividesItself(), lanes=6),
            made_up_world(),
            global_batch_size=8,
            block=3,
            workers=workers,
        )
        read.append([micro.batch for step in loading.epoch(0) for micro in step])
        next(iter(loading.epoch(1)))  # an epoch that is not read to its end leaves nothing running
    for (images, labels), (others, same) in zip(*read, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, same)
    assert sorted(torch.cat([labels for _, labels in read[1]]).tolist()) == list(range(50))
    assert random.getstate() == numbers[0]
    assert torch.equal(torch.get_rng_state(), numbers[1])


class Counting:
    """An iterable with a state, as torchdata and Hugging Face have it."""

    def __init__(self) -> None:
        self.begun_at: list[int] = []
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        self._next = 100 * epoch

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[int]:
        self.begun_at.append(self._next)
        while self._next % 100 < 40:
            self._next += 1
            yield self._next - 1


def test_an_iterable_with_a_state_is_not_read_from_the_beginning() -> None:
    whole = together([given_out(loader(Iterables(Counting(), lanes=3), made_up_world()).epoch(1))])
    assert sorted(itertools.chain(*whole)) == list(range(100, 140))
    first = loader(Iterables(Counting(), lanes=3), made_up_world())
    list(itertools.islice(first.epoch(1), 3))
    dataset = Counting()
    second = loader(Iterables(dataset, lanes=3), made_up_world())
    second.restore(first.state())
    assert together([given_out(second.epoch(1))]) == whole[3:]
    assert dataset.begun_at == [118], "24 samples were used, and a lap has 9"


def test_what_can_be_read_only_once_is_refused_and_a_function_of_the_epoch_is_taken(
    snapshot: SnapshotAssertion,
) -> None:
    with pytest.raises(Impossible) as refused:
        given_out(loader(Iterables(iter(range(5))), made_up_world()).epoch(0))
    assert "range_iterator" in refused.value.what
    assert refused.value == snapshot
    made = Iterables(lambda epoch: (10 * epoch + one for one in range(5)))
    assert together([given_out(loader(made, made_up_world()).epoch(2))]) == [[20, 21, 22, 23, 24]]


def test_a_dataset_that_is_divided_already_is_used_as_it_is() -> None:
    def program(world: World) -> Batches:
        own = range(world.global_rank, 11, world.world_size)
        return given_out(loader(Iterables(own, divided_among=world), world).epoch(0))

    assert sorted(itertools.chain(*together(run_in_lockstep(2, program)))) == list(range(11))


def test_a_dataset_with_numbers_can_be_a_stream() -> None:
    source = Indexed([f"text {one}" for one in range(30)], lanes=4)
    epochs = [together([given_out(loader(source, made_up_world()).epoch(one))]) for one in range(2)]
    assert epochs[0] != epochs[1]
    for steps in epochs:
        assert sorted(itertools.chain(*steps)) == sorted(f"text {one}" for one in range(30))
