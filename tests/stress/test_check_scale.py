"""Finding bad machines and links in large groups: the number of rounds grows with log N, not with N.

``CHECK_SEEDS=50`` simulates everything in ``benchmarks/results/check-scale.md``, which takes long.
"""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from stress import check_scale

SEEDS = int(os.environ.get("CHECK_SEEDS", "0"))


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a and b of rounds = a + b log2 N, by least squares."""
    x = [math.log2(count) for count, _ in points]
    slope, intercept = statistics.linear_regression(x, [rounds for _, rounds in points])
    return intercept, slope


def a_few() -> Iterator[dict[str, Any]]:
    """Yield what takes three seconds: large groups only where they are quickly simulated."""
    for count in (100, 200, 400):
        yield from check_scale.lines_at(count, (20,), 1, ["links of collectives", "any link"])
    for count in (100, 1_000, 10_000):
        yield from check_scale.lines_at(count, (1, 20), 1, ["machines", "any dead link"])


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    found = check_scale.lines(SEEDS) if SEEDS else a_few()
    return [one for one in found if one["world"] == check_scale.AS_ASSUMED]


@pytest.mark.stress
@pytest.mark.timeout(7200 if SEEDS else 600)
def test_rounds_grow_with_the_logarithm_of_the_number_of_machines(
    results: list[dict[str, Any]],
) -> None:
    cases = {(one["kind"], one["fault"], one["bad"]) for one in results}
    for case in sorted(cases):
        mine = [one for one in results if (one["kind"], one["fault"], one["bad"]) == case]
        points = [(one["count"], one["rounds"]) for one in mine]
        a, b = fit(points)
        for count, rounds in points:
            expected = a + b * math.log2(count)
            # By chance two suspects have the same witness, who is asked by one after the other.
            assert rounds == pytest.approx(expected, rel=0.25, abs=8), (case, points)
        # In step with N they would be ten or a thousand times as many.
        (smallest, fewest), (largest, most) = points[0], points[-1]
        assert most / fewest < 2 * math.log2(largest) / math.log2(smallest), (case, points)


@pytest.mark.stress
@pytest.mark.timeout(7200 if SEEDS else 600)
def test_nothing_good_is_accused_and_nearly_nothing_bad_is_missed(
    results: list[dict[str, Any]],
) -> None:
    searches = sum(one["seeds"] for one in results)
    wrong = searches - sum(one["exact"] for one in results)
    # Four stages may each miss something or accuse something in one search of a hundred.
    assert wrong <= max(2, 0.08 * searches), [one for one in results if one["exact"] < one["seeds"]]
