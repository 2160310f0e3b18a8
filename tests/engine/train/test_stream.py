"""Streams: each sample once, the same number of steps on all ranks, and a position to resume from."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from ranks_in_lockstep import run_in_lockstep
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.world import World

pytestmark = pytest.mark.engine

Batches = list[list[list[Any]]]  # the samples of each step's micro-batches


def loader(dataset: Any, world: World, **arguments: Any) -> StreamLoader:
    return StreamLoader(dataset, world, collate=list, **{"global_batch_size": 8, **arguments})


def samples_of(steps: Any) -> Batches:
    return [[list(micro.batch)[: micro.samples] for micro in step] for step in steps]


def together(ranks: list[Batches]) -> list[list[Any]]:
    """Return the samples of each step over all ranks, which have equal numbers of micro-batches."""
    result = []
    for steps in zip(*ranks, strict=True):
        assert len({len(step) for step in steps}) == 1
        samples = itertools.chain(*itertools.chain(*steps))
        result.append(sorted(samples))
    return result


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 150),
    ranks=st.integers(1, 3),
    batch=st.integers(1, 3),
    micro=st.integers(1, 3),
    stop=st.integers(0, 12),
)
def test_each_sample_once_and_the_rest_after_a_resume(
    size: int, ranks: int, batch: int, micro: int, stop: int
) -> None:
    samples = range(max(size, ranks))
    options: Any = {
        "global_batch_size": batch * ranks,
        "micro_batch_size": micro,
    }

    def whole(world: World) -> Batches:
        return samples_of(loader(samples, world, **options).epoch(0))

    def first(world: World) -> tuple[Batches, dict[str, Any]]:
        reading = loader(samples, world, **options)
        steps = samples_of(itertools.islice(reading.epoch(0), stop))
        return steps, json.loads(json.dumps(reading.state()))

    expected = together(run_in_lockstep(ranks, whole))
    assert sorted(itertools.chain(*expected)) == list(samples)
    begins = run_in_lockstep(ranks, first)
    assert together([steps for steps, _ in begins]) == expected[:stop]
    state = begins[0][1]
    assert all(other == state for _, other in begins)

    def rest(world: World) -> Batches:
        reading = loader(samples, world, **options)
        reading.restore(state)
        return samples_of(reading.epoch(0))

    if state["epoch"] == 0:
        assert together(run_in_lockstep(ranks, rest)) == expected[stop:]


class Counting:
    """An iterable with a state, as torchdata and Hugging Face have it."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self._next = 0

    def share(self, rank: int, ranks: int) -> "Counting":
        return self

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[int]:
        self.begins.append(self._next)
        while self._next < 100:
            self._next += 1
            yield self._next - 1


def test_a_dataset_with_a_state_is_not_read_from_the_beginning() -> None:
    first = loader(Counting(), made_up_world())
    list(itertools.islice(first.epoch(0), 9))  # 8 steps of 8 samples are read together
    dataset = Counting()
    second = loader(dataset, made_up_world())
    second.restore(first.state())
    assert samples_of(second.epoch(0))[0] == [list(range(72, 80))]
    assert dataset.begins == [72]


@pytest.mark.integrations
@pytest.mark.usefixtures("quiet_transformers")
def test_hugging_face_streams_are_divided_among_the_ranks() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"n": number} for number in range(150)])

    def numbers(samples: list[dict[str, int]]) -> list[int]:
        return [sample["n"] for sample in samples]

    def read(world: World, state: Any = None, stop: int = 99) -> tuple[Batches, Any]:
        stream = rows.to_iterable_dataset(num_shards=3).map(lambda row: {"n": row["n"]})
        reading = StreamLoader(stream, world, global_batch_size=6, collate=numbers)
        if state is not None:
            reading.restore(state)
        steps = samples_of(itertools.islice(reading.epoch(0), stop))
        return steps, reading.state()

    whole = together([steps for steps, _ in run_in_lockstep(2, read)])
    assert sorted(itertools.chain(*whole)) == list(range(150))
    (_, state), _ = run_in_lockstep(2, lambda world: read(world, stop=11))
    rest = run_in_lockstep(2, lambda world: read(world, state=state))
    assert together([steps for steps, _ in rest]) == whole[11:]


def test_a_position_of_another_number_of_ranks_is_refused(snapshot: SnapshotAssertion) -> None:
    state = {**loader(range(9), made_up_world()).state(), "step": 1, "ranks": [None, None]}
    with pytest.raises(Impossible) as refused:
        loader(range(9), made_up_world()).restore(state)
    assert str(refused.value) == snapshot


def test_an_error_of_one_rank_raises_on_all() -> None:
    class Damaged:
        def share(self, rank: int, ranks: int) -> "Part":
            return Part(rank)

    class Part:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def __iter__(self) -> Iterator[int]:
            yield 1
            if self._rank == 1:
                raise MusterError("a record of data cannot be used")

    def read(world: World) -> str:
        with pytest.raises(MusterError) as failed:
            list(loader(Damaged(), world).epoch(0))
        return failed.value.what

    assert (
        run_in_lockstep(2, read)
        == ["rank 1 could not read its data: a record of data cannot be used"] * 2
    )


def test_an_epoch_can_be_read_again() -> None:
    reading = loader(range(70), made_up_world())
    steps = samples_of(reading.epoch(0))
    assert samples_of(reading.epoch(0)) == steps
    assert reading.state()["epoch"] == 1
    assert reading.steps_in_epoch() is None
