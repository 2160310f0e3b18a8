"""Which pairs are measured, and in which rounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.diagnose.rounds import collective_links, disjoint


@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
def test_every_pair_is_in_one_round_and_nobody_is_in_two_of_a_round(count: int) -> None:
    pairs = list(itertools.combinations(range(count), 2))
    rounds = disjoint(pairs)
    assert sorted(itertools.chain.from_iterable(rounds)) == pairs
    for members in rounds:
        busy = list(itertools.chain.from_iterable(members))
        assert len(busy) == len(set(busy))
    assert len(rounds) <= 2 * count


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
    tried = set(collective_links(count))
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
