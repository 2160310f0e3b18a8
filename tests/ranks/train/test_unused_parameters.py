"""Parameters without a gradient are named, before DDP waits for them or FSDP mixes them up."""

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import strategies

pytestmark = pytest.mark.ranks


def _refused(run_ranks: RunRanks, ranks: int, ranks_that_use: list[int], more: int = 0) -> str:
    """Return the message of the error that ends a rank's traceback."""
    with pytest.raises(AssertionError) as raised:
        run_ranks(strategies.unused, ranks, ranks_that_use, more, False)
    (message,) = re.findall(r"^torchmuster\.errors\.\w+: (.*)", str(raised.value), re.M | re.S)
    return str(message)


def test_parameters_that_no_rank_uses_are_named_with_both_fixes(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    text = _refused(run_ranks, 2, [])
    for fact in (
        "spare.weight, spare.bias",
        "requires_grad_(False)",
        "find_unused_parameters=True",
    ):
        assert fact in text
    assert text == snapshot


def test_ranks_that_do_not_use_a_parameter_are_named_while_the_others_wait(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    text = _refused(run_ranks, 3, [1])
    for fact in ("ranks 0, 2 only", "spare.weight, spare.bias", "find_unused_parameters=True"):
        assert fact in text
    assert text == snapshot


def test_find_unused_parameters_trains_on(run_ranks: RunRanks) -> None:
    norms = run_ranks(strategies.unused, 2, [1], 0, True)
    assert norms[0] == norms[1]
    assert all(one > 0 for one in norms[0])


@pytest.mark.nightly
def test_fsdp_refuses_gradients_that_only_some_ranks_have(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    answers = run_ranks(strategies.used_here_and_there, 3)
    refused = answers[0][1]
    assert answers == [["True", refused, "True", refused]] * 3
    assert "right.weight (none on rank 0)" in refused
    assert "left.weight (none on ranks 1, 2)" in refused
    assert refused == snapshot
