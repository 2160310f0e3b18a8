"""The order of an epoch: computed place by place, never stored."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.train.data.order import Order

pytestmark = pytest.mark.engine


def whole(order: Order) -> torch.Tensor:
    return order.samples_at(torch.arange(order.size))


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_every_sample_comes_exactly_once(size: int, seed: int, epoch: int) -> None:
    samples = whole(Order(size=size, seed=seed, epoch=epoch))
    assert torch.equal(samples.sort().values, torch.arange(size))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(10**6, 10**12), seed=st.integers(), data=st.data())
def test_in_a_huge_dataset_any_place_is_found_alone_and_no_two_are_the_same(
    size: int, seed: int, data: st.DataObject
) -> None:
    order = Order(size=size, seed=seed, epoch=1)
    places = data.draw(
        st.lists(st.integers(0, size - 1), min_size=2, max_size=50, unique=True), "places"
    )
    samples = order.samples_at(torch.tensor(places)).tolist()
    assert len(set(samples)) == len(places)
    assert all(0 <= sample < size for sample in samples)
    assert order.samples_at(torch.tensor(places[-1:])).tolist() == samples[-1:]


def test_without_shuffling_it_is_the_order_of_the_dataset() -> None:
    order = Order(size=100, seed=3, epoch=7, shuffle=False)
    assert whole(order).tolist() == list(range(100))


def test_the_order_of_a_seed_never_changes() -> None:
    """Runs that were saved are continued with it: another order would repeat and skip samples."""
    small = Order(size=10, seed=0, epoch=0)
    assert whole(small).tolist() == [4, 0, 7, 6, 2, 8, 5, 9, 1, 3]
    huge = Order(size=10**12, seed=5, epoch=2)
    assert huge.samples_at(torch.tensor([0, 1, 10**12 - 1])).tolist() == [
        772882426896,
        219833116420,
        319664395458,
    ]


@pytest.mark.parametrize("size", [1000, 1024, 20_011])
def test_epochs_and_seeds_have_nothing_in_common(size: int) -> None:
    orders = [
        whole(Order(size=size, seed=seed, epoch=epoch)).double()
        for seed in (0, 1)
        for epoch in range(4)
    ]
    table = torch.stack([*orders, torch.arange(size).double(), orders[0].roll(1)])
    correlation = torch.corrcoef(table).fill_diagonal_(0).abs().max()
    assert correlation < 5 / size**0.5  # five standard deviations of what chance gives
    same = sum(int((a == b).sum()) for a, b in itertools.combinations(orders, 2))
    assert same < 28 + 5 * 28**0.5  # one place in each pair, on average


def test_all_orders_of_a_small_dataset_come_about_equally_often() -> None:
    rounds = 960
    seen = Counter(
        tuple(whole(Order(size=4, seed=seed, epoch=0)).tolist()) for seed in range(rounds)
    )
    expected = rounds / 24
    assert len(seen) == 24
    chi_squared = sum((times - expected) ** 2 / expected for times in seen.values())
    assert chi_squared < 60  # 23 degrees of freedom: beyond 60 once in 30,000 tries
