"""The order of the samples in an epoch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.train.data.order import sample_order

pytestmark = pytest.mark.engine


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_every_sample_comes_exactly_once(size: int, seed: int, epoch: int) -> None:
    samples = sample_order(size, seed=seed, epoch=epoch)
    assert samples.sort().values.tolist() == list(range(size))


def test_seeds_and_epochs_have_other_orders_and_the_same_ones_the_same() -> None:
    orders = [
        tuple(sample_order(100, seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    assert tuple(sample_order(100, seed=1, epoch=2).tolist()) == orders[5]
    assert sample_order(4, seed=1, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3]
