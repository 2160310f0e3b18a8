"""Who is paired with whom: everybody with everybody, nobody twice at a time."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.diagnose.rounds import collective_rounds, rounds_for


@given(st.integers(min_value=0, max_value=60))
def test_every_two_meet_exactly_once(count: int) -> None:
    meetings = [pair for turn in rounds_for(count) for pair in turn]
    assert sorted(meetings) == list(combinations(range(count), 2))


@given(st.integers(min_value=2, max_value=60))
def test_nobody_is_in_two_pairs_of_a_round(count: int) -> None:
    for turn in rounds_for(count):
        busy = [one for pair in turn for one in pair]
        assert len(busy) == len(set(busy))


@given(st.integers(min_value=2, max_value=60))
def test_no_order_has_fewer_rounds(count: int) -> None:
    # Each round has room for count // 2 of the count * (count - 1) / 2 pairs.
    assert len(rounds_for(count)) == (count - 1 if count % 2 == 0 else count)


@pytest.mark.parametrize("count", [0, 1])
def test_one_machine_meets_nobody(count: int) -> None:
    assert rounds_for(count) == []


def test_the_order_is_always_the_same() -> None:
    assert rounds_for(4) == [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]


def nccl_trees(count: int) -> set[tuple[int, int]]:
    """The links of NCCL's two binary trees: a rank's parent, and the same mirrored or shifted by one."""

    def parent(rank: int) -> int:
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        return up if up < count else rank ^ bit

    first = [(rank, parent(rank)) for rank in range(1, count)]
    if count % 2:
        second = [((one + 1) % count, (other + 1) % count) for one, other in first]
    else:
        second = [(count - 1 - one, count - 1 - other) for one, other in first]
    return {(min(pair), max(pair)) for pair in first + second}


@given(st.integers(min_value=2, max_value=300))
def test_collectives_use_no_other_links(count: int) -> None:
    tried = {pair for turn in collective_rounds(count) for pair in turn}
    ring = {(min(one, (one + 1) % count), max(one, (one + 1) % count)) for one in range(count)}
    doubling = {
        (one, one ^ 1 << bit)
        for bit in range(count.bit_length())
        for one in range(count)
        if one < one ^ 1 << bit < count
    }
    assert ring <= tried
    assert doubling <= tried
    assert nccl_trees(count) <= tried


@given(st.integers(min_value=2, max_value=300))
def test_links_of_collectives_take_three_rounds_for_each_doubling(count: int) -> None:
    rounds = collective_rounds(count)
    assert len(rounds) <= 3 * (count - 1).bit_length()
    met = [pair for turn in rounds for pair in turn]
    assert len(met) == len(set(met))
    for turn in rounds:
        busy = [one for pair in turn for one in pair]
        assert len(busy) == len(set(busy))
