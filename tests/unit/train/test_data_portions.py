"""Who computes which samples of a global batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.train.data.batch_split import (
    BatchSplit,
    proportional_sizes,
    propose_micro_batch_sizes,
    split_batch,
)


def sizes_by_round(portions: BatchSplit, samples: int) -> list[list[int]]:
    ranks = range(len(portions.micro_batch_sizes))
    slices = [portions.slices(samples, rank) for rank in ranks]
    return [[one.stop - one.start for one in its_round] for its_round in zip(*slices, strict=True)]


@settings(max_examples=300, deadline=None)
@given(
    micro_batch_sizes=st.lists(st.integers(1, 12), min_size=1, max_size=64),
    whole=st.integers(1, 2000),
    left=st.integers(1, 2000),
)
def test_each_sample_has_one_place_and_no_rank_is_idle_without_need(
    micro_batch_sizes: list[int], whole: int, left: int
) -> None:
    ranks = len(micro_batch_sizes)
    portions = split_batch(ranks, global_batch_size=whole, micro_batch_sizes=micro_batch_sizes)
    samples = min(left, whole)
    slices = [portions.slices(samples, rank) for rank in range(ranks)]
    rounds = -(-samples // sum(micro_batch_sizes))
    assert {len(one) for one in slices} == {rounds} == {portions.rounds_for(samples)}
    places = [
        place
        for its_round in zip(*slices, strict=True)
        for part in its_round
        for place in range(part.start, part.stop)
    ]
    assert places == list(range(samples))
    idle = 0
    for rank, one in enumerate(slices):
        for part in one:
            assert part.stop - part.start <= micro_batch_sizes[rank]
            idle += part.stop == part.start
    assert idle == max(0, rounds * ranks - samples)


def test_equal_sizes_by_default_and_own_sizes_where_given() -> None:
    equal = split_batch(4, global_batch_size=64, micro_batch_size=8)
    assert (equal.rounds, sizes_by_round(equal, 64)) == (2, [[8, 8, 8, 8]] * 2)
    unlike = split_batch(3, global_batch_size=36, micro_batch_sizes=(8, 8, 2))
    assert sizes_by_round(unlike, 36) == [[8, 8, 2]] * 2


def test_a_tail_is_spread_and_a_small_rank_still_gets_a_sample() -> None:
    equal = split_batch(4, global_batch_size=64, micro_batch_size=8)
    assert sizes_by_round(equal, 33) == [[5, 4, 4, 4], [4, 4, 4, 4]]
    assert sizes_by_round(equal, 3) == [[1, 1, 1, 0]]
    unlike = split_batch(3, micro_batch_sizes=(8, 2, 8))
    assert sizes_by_round(unlike, 9) == [[4, 1, 4]]
    assert sizes_by_round(unlike, 2) == [[1, 0, 1]]


@pytest.mark.parametrize(
    ("given_sizes", "whole", "micro_batch_sizes", "rounds"),
    [
        ({"micro_batch_size": 8}, 16, (8, 8), 1),
        ({"micro_batch_size": 8, "accumulation": 4}, 64, (8, 8), 4),
        ({"micro_batch_sizes": [6, 2], "accumulation": 3}, 24, (6, 2), 3),
        ({"global_batch_size": 17}, 17, (9, 9), 1),
        ({"global_batch_size": 17, "accumulation": 2}, 17, (5, 5), 2),
        ({"global_batch_size": 17, "micro_batch_size": 4}, 17, (4, 4), 3),
        ({"global_batch_size": 16, "micro_batch_size": 4, "accumulation": 2}, 16, (4, 4), 2),
    ],
)
def test_what_was_not_given_follows_from_what_was(
    given_sizes: dict[str, int], whole: int, micro_batch_sizes: tuple[int, ...], rounds: int
) -> None:
    portions = split_batch(2, **given_sizes)  # type: ignore[arg-type]
    assert portions == BatchSplit(global_batch_size=whole, micro_batch_sizes=micro_batch_sizes)
    assert portions.rounds == rounds


@pytest.mark.parametrize(
    "given_sizes",
    [
        {},
        {"micro_batch_size": 2, "micro_batch_sizes": [1, 1]},
        {"micro_batch_sizes": [4, 4, 1]},
        {"global_batch_size": 0},
        {"micro_batch_sizes": [4, 0]},
        {"micro_batch_size": 4, "accumulation": 0},
        {"global_batch_size": 64, "micro_batch_size": 8, "accumulation": 2},
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other_are_refused(
    given_sizes: dict[str, int], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refused:
        split_batch(2, **given_sizes)  # type: ignore[arg-type]
    assert str(refused.value) == snapshot


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(0, 10_000),
    weights=st.lists(st.floats(0.01, 1000), min_size=1, max_size=64),
)
def test_proportional_shares_add_up_and_are_off_by_less_than_one(
    total: int, weights: list[float]
) -> None:
    shares = proportional_sizes(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


def test_unlike_cards_get_what_they_can_compute_and_the_reason_says_so(
    snapshot: SnapshotAssertion,
) -> None:
    names = ["RTX 3090", "RTX 3090", "Tesla T4"]
    proposed = propose_micro_batch_sizes(18, [400.0, 400.0, 100.0], names)
    assert proposed.value == (8, 8, 2)
    assert proposed.reason == snapshot
    by_memory = propose_micro_batch_sizes(20, [24.0, 16.0], ["A", "B"], measured="memory")
    assert by_memory.value == (12, 8)
    assert by_memory.reason == snapshot
    alike = propose_micro_batch_sizes(6, [1.0, 1.0], ["A", "A"])
    assert alike.value == (3, 3)
    assert alike.reason == snapshot


def test_even_the_slowest_card_gets_one_sample(snapshot: SnapshotAssertion) -> None:
    assert propose_micro_batch_sizes(10, [100.0, 100.0, 1.0], ["A", "A", "B"]).value == (5, 4, 1)
    with pytest.raises(Impossible) as refused:
        propose_micro_batch_sizes(2, [1.0, 1.0, 1.0], ["A"] * 3)
    assert refused.value.what == snapshot
