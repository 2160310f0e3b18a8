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


def test_a_model_that_needs_its_values_is_built_whole_and_rank_0_s_values_count(
    run_ranks: RunRanks,
) -> None:
    alone = run_ranks(sharded.whole_everywhere, 1)
    assert run_ranks(sharded.whole_everywhere, 2) == alone * 2
