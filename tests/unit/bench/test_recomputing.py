"""Which blocks to compute again: the ways that are tried, and the choice by made-up costs."""

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.memory import (
    RecomputeMode,
    best_recompute,
    recompute_modes_for,
    recompute_name,
)
from torchmuster.plan.job import Recompute
from torchmuster.units import MiB


def way(
    recompute: Recompute, blocks: int, peak_mib: int | None, step_ms: float = 0.0
) -> RecomputeMode:
    times = (step_ms / 1000,) * 5 if peak_mib is not None else ()
    peak = None if peak_mib is None else peak_mib * MiB
    return RecomputeMode(recompute=recompute, blocks=blocks, peak_bytes=peak, step_s=times)


# Twelve blocks of 50 MiB: each costs 10 ms to compute again, and up to six of them what is saved counts.
KNEE = [
    way("full", 12, 390, 220),
    way(2, 6, 400, 160),
    way(3, 4, 500, 140),
    way("selective", 12, 600, 125),
    way("none", 0, 700, 100),
]
STRAIGHT = [
    way("full", 12, 100, 220),
    way(2, 6, 400, 160),
    way(3, 4, 500, 140),
    way("none", 0, 700, 100),
]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (0, ["none"]),
        (1, ["full", "selective", "none"]),
        (4, ["full", 2, 3, "selective", "none"]),  # 3 and 4 both leave one block
        (12, ["full", 2, 3, 5, "selective", "none"]),
    ],
)
def test_each_number_of_blocks_is_tried_once_and_what_saves_most_first(
    blocks: int, expected: list[Recompute]
) -> None:
    assert recompute_modes_for(blocks) == expected


def test_of_a_deep_model_a_few_ways_are_tried_and_the_ends_always() -> None:
    for blocks in range(1, 200):
        ways = recompute_modes_for(blocks)
        assert len(ways) <= 7
        assert (ways[0], ways[-2:]) == ("full", ["selective", "none"])
        again = [blocks // (1 if one == "full" else int(one)) for one in ways[:-2]]
        assert again == sorted(set(again), reverse=True)


def test_within_a_limit_the_fastest_is_taken(snapshot: SnapshotAssertion) -> None:
    decided = best_recompute(KNEE, limit_bytes=550 * MiB)
    assert decided is not None
    assert decided.value.recompute == 3
    assert decided.reason == snapshot


def test_where_all_fits_within_a_limit_nothing_is_computed_again() -> None:
    decided = best_recompute(KNEE, limit_bytes=700 * MiB)
    assert decided is not None
    assert decided.value.recompute == "none"


def test_of_ways_that_are_as_fast_the_one_that_computes_least_again_is_taken() -> None:
    decided = best_recompute(
        [way("full", 4, 90, 99), way("none", 0, 100, 100)], limit_bytes=100 * MiB
    )
    assert decided is not None
    assert decided.value.recompute == "none"


def test_what_is_within_the_noise_of_the_fastest_is_as_fast() -> None:
    noisy = RecomputeMode(
        recompute="full", blocks=4, peak_bytes=90, step_s=(0.08, 0.09, 0.1, 0.11, 0.12)
    )
    plain = RecomputeMode(recompute="none", blocks=0, peak_bytes=100, step_s=(0.115,) * 5)
    decided = best_recompute([noisy, plain], limit_bytes=100)
    assert decided is not None
    assert decided.value is plain


def test_where_nothing_stays_within_the_limit_nothing_is_chosen() -> None:
    assert best_recompute(KNEE, limit_bytes=300 * MiB) is None


def test_what_the_allocator_keeps_counts_against_a_limit() -> None:
    kept = RecomputeMode(
        recompute="none", blocks=0, peak_bytes=100, reserved_bytes=150, step_s=(1.0,)
    )
    assert best_recompute([kept], limit_bytes=120) is None


def test_without_a_limit_the_knee_is_found(snapshot: SnapshotAssertion) -> None:
    decided = best_recompute(KNEE, limit_bytes=None)
    assert decided is not None
    assert decided.value.recompute == 2
    assert decided.reason == snapshot


def test_a_straight_line_has_no_knee_and_the_reason_says_what_to_do(
    snapshot: SnapshotAssertion,
) -> None:
    decided = best_recompute(STRAIGHT, limit_bytes=None)
    assert decided is not None
    assert decided.value.recompute == "none"
    assert decided.reason == snapshot
    assert "--limit SIZE" in decided.reason


def test_a_knee_that_is_within_the_noise_is_none() -> None:
    noisy = (0.1, 0.3, 0.12, 0.28, 0.1, 0.1, 0.3)
    ways = [
        RecomputeMode(recompute="full", blocks=4, peak_bytes=100, step_s=(0.2,) * 7),
        RecomputeMode(recompute=2, blocks=2, peak_bytes=130, step_s=noisy),
        RecomputeMode(recompute="none", blocks=0, peak_bytes=200, step_s=(0.1,) * 7),
    ]
    decided = best_recompute(ways, limit_bytes=None)
    assert decided is not None
    assert decided.value.recompute == "none"


def test_what_hardly_saves_is_not_worth_it(snapshot: SnapshotAssertion) -> None:
    decided = best_recompute([way("full", 4, 95, 120), way("none", 0, 100, 100)], limit_bytes=None)
    assert decided is not None
    assert decided.value.recompute == "none"
    assert decided.reason == snapshot


def test_what_costs_nothing_is_taken(snapshot: SnapshotAssertion) -> None:
    decided = best_recompute([way("full", 4, 50, 101), way("none", 0, 100, 100)], limit_bytes=None)
    assert decided is not None
    assert decided.value.recompute == "full"
    assert decided.reason == snapshot


def test_what_did_not_fit_is_not_taken(snapshot: SnapshotAssertion) -> None:
    ways = [way("full", 12, 390, 220), way(2, 6, 500, 160), way("none", 0, None)]
    decided = best_recompute(ways, limit_bytes=None)
    assert decided is not None
    assert decided.value.recompute == 2
    assert decided.reason == snapshot
    assert best_recompute([way("full", 12, None), way("none", 0, None)], limit_bytes=None) is None


def test_ways_have_names() -> None:
    ways: list[Recompute] = ["none", "full", 1, 2, 3, 4, "selective"]
    assert [recompute_name(one) for one in ways] == [
        *("nothing", "every block", "every block", "every 2nd block", "every 3rd block"),
        *("every 4th block", "selective"),
    ]
