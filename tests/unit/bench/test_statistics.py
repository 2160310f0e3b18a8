"""An interval holds what it promises, and promises nothing where it cannot."""

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.bench.statistics import Estimate, estimate, fewest, shift

NUMBERS = st.floats(min_value=-1e6, max_value=1e6)


def test_the_interval_is_between_the_right_samples() -> None:
    # The usual table: of 15 samples the 4th and the 12th, of 9 the 2nd and the 8th.
    assert estimate(range(15)) == Estimate(median=7, low=3, high=11, count=15)
    assert estimate(range(9)) == Estimate(median=4, low=1, high=7, count=9)


@pytest.mark.parametrize("count", range(1, 6))
def test_fewer_than_six_samples_give_their_whole_range(count: int) -> None:
    found = estimate([float(one) for one in range(count)])
    assert (found.low, found.high) == (0, count - 1)


@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_the_median_is_inside_and_order_does_not_matter(samples: list[float]) -> None:
    found = estimate(samples)
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)
    assert found == estimate(sorted(samples, reverse=True))


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    drawn = random.Random(7)
    tries = 2000
    held = 0
    for _ in range(tries):
        found = estimate([drawn.lognormvariate(0, 1) for _ in range(15)])
        held += found.low <= 1 <= found.high
    assert held / tries > 0.94


def test_noise_is_the_half_width_as_a_share() -> None:
    assert Estimate(median=10, low=9, high=12, count=9).noise == pytest.approx(0.15)
    assert Estimate(median=0, low=0, high=0, count=9).noise == 0
    assert Estimate(median=0, low=-1, high=1, count=9).noise == math.inf


def test_a_shift_is_found_with_its_interval() -> None:
    a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = shift(a, [one + 10 for one in a], confidence=0.95)
    assert found.middle == 10
    assert 5 <= found.low < 10 < found.high <= 15


def test_too_few_values_give_no_interval() -> None:
    found = shift([1, 2, 3], [101, 102, 103], confidence=0.99)
    assert (found.middle, found.low, found.high) == (100, -math.inf, math.inf)


def test_a_shift_is_never_certain_more_often_than_allowed() -> None:
    # All ways to divide ten values into two halves, as chance would: exactly what the test must hold.
    values = [1.0, 1.5, 2.1, 2.8, 3.6, 4.5, 5.5, 6.6, 7.8, 9.1]
    certain = ways = 0
    for chosen in combinations(range(10), 5):
        a = [values[one] for one in chosen]
        b = [values[one] for one in range(10) if one not in chosen]
        found = shift(a, b, confidence=0.95)
        certain += found.low > 0 or found.high < 0
        ways += 1
    assert 0.02 < certain / ways <= 0.05


@pytest.mark.parametrize("count", [1, 4, 10, 50])
def test_so_many_values_are_needed_and_enough(count: int) -> None:
    size = fewest(count, confidence=0.99)
    confidence = 1 - 0.01 / count

    def known(size: int) -> bool:
        values = [float(one) for one in range(size)]
        return math.isfinite(shift(values, values, confidence=confidence).low)

    assert known(size)
    assert not known(size - 1)
