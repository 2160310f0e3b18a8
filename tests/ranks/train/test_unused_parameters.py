"""Parameters without a gradient are named, before DDP waits for them."""

import re

import pytest

from rank_group import RunRanks
from rank_programs import strategies

pytestmark = pytest.mark.ranks


def _refused(run_ranks: RunRanks, ranks: int, ranks_that_use: list[int], more: int = 0) -> str:
    """Return the message of the error that ends a rank's traceback."""
    with pytest.raises(AssertionError) as raised:
        run_ranks(strategies.unused, ranks, ranks_that_use, more, False)
    (message,) = re.findall(r"^torchmuster\.errors\.\w+: (.*)", str(raised.value), re.M | re.S)
    return str(message)


@pytest.mark.parametrize(("ranks", "ranks_that_use"), [(2, []), (3, [1])])
def test_parameters_without_a_gradient_are_named_with_both_fixes(
    run_ranks: RunRanks, ranks: int, ranks_that_use: list[int]
) -> None:
    text = _refused(run_ranks, ranks, ranks_that_use)
    for fact in (
        "spare.weight, spare.bias",
        "requires_grad_(False)",
        "find_unused_parameters=True",
    ):
        assert fact in text


def test_find_unused_parameters_trains_on(run_ranks: RunRanks) -> None:
    norms = run_ranks(strategies.unused, 2, [1], 0, True)
    assert norms[0] == norms[1]
    assert all(one > 0 for one in norms[0])
