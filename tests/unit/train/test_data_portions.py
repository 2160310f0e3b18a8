"""Who computes which samples of a global batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.train.data.batch_split import BatchSplit, split_batch


def sizes_by_round(portions: BatchSplit, samples: int) -> list[list[int]]:
    ranks = range(portions.ranks)
    slices = [portions.slices(samples, rank) for rank in ranks]
    return [[one.stop - one.start for one in its_round] for its_round in zip(*slices, strict=True)]


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.integers(1, 64),
    micro_batch_size=st.integers(1, 12),
    whole=st.integers(1, 2000),
    left=st.integers(1, 2000),
)
def test_each_sample_has_one_place_and_no_rank_is_idle_without_need(
    ranks: int, micro_batch_size: int, whole: int, left: int
) -> None:
    portions = split_batch(ranks, global_batch_size=whole, micro_batch_size=micro_batch_size)
    samples = min(left, whole)
    slices = [portions.slices(samples, rank) for rank in range(ranks)]
    rounds = -(-samples // (ranks * micro_batch_size))
    assert {len(one) for one in slices} == {rounds} == {portions.rounds_for(samples)}
    places = [
        place
        for its_round in zip(*slices, strict=True)
        for part in its_round
        for place in range(part.start, part.stop)
    ]
    assert places == list(range(samples))
    idle = 0
    for one in slices:
        for part in one:
            assert part.stop - part.start <= micro_batch_size
            idle += part.stop == part.start
    assert idle == max(0, rounds * ranks - samples)


def test_a_full_step_is_split_evenly() -> None:
    equal = split_batch(4, global_batch_size=64, micro_batch_size=8)
    assert (equal.rounds, sizes_by_round(equal, 64)) == (2, [[8, 8, 8, 8]] * 2)


def test_a_smaller_last_step_is_spread_over_the_ranks() -> None:
    equal = split_batch(4, global_batch_size=64, micro_batch_size=8)
    assert sizes_by_round(equal, 33) == [[4, 4, 4, 4], [4, 4, 4, 5]]
    assert sizes_by_round(equal, 3) == [[0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("given_sizes", "whole", "micro_batch_size", "rounds"),
    [
        ({"micro_batch_size": 8}, 16, 8, 1),
        ({"global_batch_size": 17}, 17, 9, 1),
        ({"global_batch_size": 17, "micro_batch_size": 4}, 17, 4, 3),
    ],
)
def test_what_was_not_given_follows_from_what_was(
    given_sizes: dict[str, int], whole: int, micro_batch_size: int, rounds: int
) -> None:
    portions = split_batch(2, **given_sizes)
    assert portions == BatchSplit(
        ranks=2, global_batch_size=whole, micro_batch_size=micro_batch_size
    )
    assert portions.rounds == rounds


@pytest.mark.parametrize(
    "given_sizes",
    [
        {},
        {"global_batch_size": 0},
        {"micro_batch_size": 0},
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other_are_refused(
    given_sizes: dict[str, int], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refused:
        split_batch(2, **given_sizes)
    assert str(refused.value) == snapshot
