"""Failures: known cases of the model, and its agreement with the played months."""

import math
from dataclasses import replace

import pytest

from torchmuster.rehearse.failures import (
    GPU_HOURS_PER_FAILURE,
    Costs,
    Fleet,
    best_interval_s,
    best_spares,
    expected_goodput,
    play,
    value_of_spares,
)

COSTS = Costs(stall_s=2.0, save_s=30.0, restart_s=300.0, takeover_s=60.0)
META = Fleet(hosts=2048, gpus_per_host=8, elastic=True)


def test_the_published_run_has_its_published_number_of_failures() -> None:
    assert 54 * 86400 / META.failure_every_s == pytest.approx(419)
    assert pytest.approx(50_677, abs=1) == GPU_HOURS_PER_FAILURE


def test_the_interval_is_youngs_optimum() -> None:
    assert best_interval_s(COSTS, META) == pytest.approx(math.sqrt(2 * 2.0 * META.failure_every_s))
    slow = replace(COSTS, save_s=4000.0)
    assert best_interval_s(slow, META) == 4000.0  # the last save is not over before


def test_the_optimum_is_better_than_its_neighbours() -> None:
    best = best_interval_s(COSTS, META)
    there = expected_goodput(best, COSTS, META)
    assert there > expected_goodput(best / 3, COSTS, META)
    assert there > expected_goodput(best * 3, COSTS, META)


@pytest.mark.parametrize("spares", [0, 20])
def test_played_months_agree_with_the_formula(spares: int) -> None:
    fleet = replace(META, spares=spares, repair_s=60.0)
    interval_s = best_interval_s(COSTS, fleet)
    months = [play(fleet, COSTS, interval_s, seed=seed) for seed in range(40)]
    mean = sum(one.training for one in months) / len(months)
    # Without spares, each repaired host needs a second restart, which the formula does not know.
    fair = COSTS if spares else replace(COSTS, restart_s=2 * COSTS.restart_s)
    assert mean == pytest.approx(expected_goodput(interval_s, fair, fleet), abs=0.01)
    failures = sum(one.failures for one in months) / len(months)
    assert failures == pytest.approx(30 * 86400 / fleet.failure_every_s, rel=0.1)


def test_the_shares_of_a_month_are_whole() -> None:
    month = play(replace(META, spares=3), COSTS, 600.0, seed=1)
    total = month.training + month.saving + month.lost_work + month.recovering
    assert total == pytest.approx(1.0, abs=0.002)
    assert 0 < month.of_paid < month.goodput < 1
    assert month.takeovers <= month.failures


def test_one_host_that_is_repaired_as_long_as_it_works_does_half_the_work() -> None:
    alone = Fleet(hosts=1, gpus_per_host=1, gpu_hours_per_failure=24.0, repair_s=86400.0)
    months = [play(alone, COSTS, 600.0, seed=seed) for seed in range(200)]
    assert sum(one.goodput for one in months) / 200 == pytest.approx(0.5, abs=0.05)


def test_a_month_is_repeatable() -> None:
    assert play(META, COSTS, 600.0, seed=3) == play(META, COSTS, 600.0, seed=3)


def test_spares_are_worth_having_where_hosts_fail_often() -> None:
    waits = replace(META, elastic=False)
    assert best_spares(value_of_spares(waits, COSTS, 600.0)) > 5
    assert best_spares(value_of_spares(META, COSTS, 600.0)) >= 3
    few = Fleet(hosts=2, gpus_per_host=8, elastic=True)
    assert best_spares(value_of_spares(few, COSTS, 600.0)) == 0


def test_a_run_that_waits_for_repairs_stands_still() -> None:
    waits = replace(META, elastic=False, repair_s=3 * META.failure_every_s)
    assert play(waits, COSTS, 600.0).goodput == pytest.approx(0.25, abs=0.1)
