"""The line through times by size: found where it is known, honest where there is none."""

import random

import pytest

from torchmuster.bench import bandwidth

SIZES = (1024, 4096, 16384, 65536, 262144, 1048576, 4194304)


def times(latency_s: float, bytes_s: float, *, noise: float = 0.0) -> dict[int, list[float]]:
    draw = random.Random(1)
    return {
        size: [(latency_s + size / bytes_s) * (1 + noise * draw.uniform(-1, 1)) for _ in range(15)]
        for size in SIZES
    }


def test_a_line_is_found_again_exactly() -> None:
    fit = bandwidth.fit_alpha_beta(times(50e-6, 2e9))
    assert fit is not None
    assert fit.latency_s == pytest.approx(50e-6)
    assert fit.bytes_s == pytest.approx(2e9)
    assert fit.misfit == pytest.approx(0, abs=1e-9)
    assert fit.takes_s(10**6) == pytest.approx(50e-6 + 10**6 / 2e9)


def test_the_intervals_hold_the_truth_and_grow_with_the_noise() -> None:
    little = bandwidth.fit_alpha_beta(times(50e-6, 2e9, noise=0.02))
    much = bandwidth.fit_alpha_beta(times(50e-6, 2e9, noise=0.3))
    assert little is not None
    assert much is not None
    for fit in (little, much):
        assert fit.latency_low_s < 50e-6 < fit.latency_high_s
        assert fit.bytes_low_s is not None
        assert fit.bytes_high_s is not None
        assert fit.bytes_low_s < 2e9 < fit.bytes_high_s
    assert much.latency_high_s - much.latency_low_s > little.latency_high_s - little.latency_low_s


def test_small_and_large_messages_count_alike() -> None:
    """By absolute errors the largest message alone would decide, and latency would be anything."""
    one = times(50e-6, 2e9)
    one[SIZES[-1]] = [2 * took for took in one[SIZES[-1]]]
    fit = bandwidth.fit_alpha_beta(one)
    assert fit is not None
    assert fit.latency_s == pytest.approx(50e-6, rel=0.1)
    assert fit.misfit > 0.1


def test_times_that_do_not_grow_say_nothing_of_bandwidth() -> None:
    fit = bandwidth.fit_alpha_beta({size: [1e-3] * 9 for size in SIZES})
    assert fit is not None
    assert fit.bytes_s is None
    assert fit.latency_s == pytest.approx(1e-3)


def test_two_sizes_are_no_line() -> None:
    assert bandwidth.fit_alpha_beta({1: [1.0] * 9, 2: [2.0] * 9}) is None
