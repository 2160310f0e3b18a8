"""The learning rate does not depend on ranks and micro-batches; steps that are skipped count."""

import math

import pytest

from rank_group import RunRanks
from rank_programs import updating

pytestmark = pytest.mark.ranks


def test_the_curve_is_the_same_for_any_number_of_ranks_and_any_accumulation(
    run_ranks: RunRanks,
) -> None:
    falling = [0.1 * 0.5 * (1 + math.cos(math.pi * n / 5)) for n in range(5)]
    expected = [0.05, 0.1, *falling, 0.0]
    for ranks, rounds in ((1, 3), (2, 1), (4, 2)):
        for rates in run_ranks(updating.learning_rates, ranks, rounds):
            assert rates == pytest.approx(expected, abs=1e-12)
