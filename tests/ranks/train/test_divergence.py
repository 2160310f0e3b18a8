"""Weights that should be the same on all ranks, and are not."""

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import mishaps

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("name", "ranks", "apart"),
    [("ddp", 3, "ranks 0, 1 against rank 2"), ("hybrid", 4, "rank 1 against rank 3")],
)
def test_the_first_tensor_that_differs_is_named(
    run_ranks: RunRanks, name: str, ranks: int, apart: str, snapshot: SnapshotAssertion
) -> None:
    of_ranks = run_ranks(mishaps.weights_apart, ranks, name)
    assert all(one == of_ranks[0] for one in of_ranks)
    before, between, after = of_ranks[0]
    assert before is None
    assert between is None  # not yet time to look
    assert after["status"] == "failure"
    # The first has a value that was changed, the other one two values that were exchanged.
    for fact in ("step 4", "layers.0.weight", "1 more"):
        assert fact in after["what"]
    assert after["why"].startswith(apart)
    assert "step 2" in after["why"]
    assert [after["what"], after["why"]] == snapshot


def test_shards_without_replicas_have_nothing_to_compare(run_ranks: RunRanks) -> None:
    assert run_ranks(mishaps.weights_apart, 2, "fsdp") == [[None, None, None]] * 2
