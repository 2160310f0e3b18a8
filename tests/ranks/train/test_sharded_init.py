"""Values of a model that is sharded before it has any: the same for any number of ranks."""

import pytest

from rank_group import RunRanks
from rank_programs import sharded

pytestmark = pytest.mark.ranks


def test_values_are_the_same_for_any_number_of_ranks_and_any_way_to_spread_the_model(
    run_ranks: RunRanks,
) -> None:
    found = {ranks: run_ranks(sharded.digests, ranks, 7) for ranks in (1, 2, 3, 4)}
    assert {way for of_ranks in found.values() for way in of_ranks[0]} == {
        "single",
        "ddp",
        "fsdp",
        "offload",
        "hybrid",
    }
    every = {digest for of_ranks in found.values() for one in of_ranks for digest in one.values()}
    assert len(every) == 1
    assert run_ranks(sharded.digests, 1, 8)[0]["fsdp"] not in every


@pytest.mark.nightly
def test_no_two_shards_are_alike(run_ranks: RunRanks) -> None:
    sums = [one for of_rank in run_ranks(sharded.shards_differ, 3) for one in of_rank]
    assert len(set(sums)) == 9


@pytest.mark.nightly
def test_what_python_and_numpy_draw_is_the_same_for_any_number_of_ranks(
    run_ranks: RunRanks,
) -> None:
    alone = run_ranks(sharded.drawn, 1)
    assert alone[0][1]
    assert len({one for values in alone[0][0] for one in values}) == 4
    assert run_ranks(sharded.drawn, 2) == alone * 2


def test_a_model_that_needs_its_values_is_built_whole_and_rank_0_s_values_count(
    run_ranks: RunRanks,
) -> None:
    alone = run_ranks(sharded.whole_everywhere, 1)
    assert run_ranks(sharded.whole_everywhere, 2) == alone * 2
