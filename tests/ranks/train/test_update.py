"""One optimizer step on several ranks."""

import pytest

from rank_group import RunRanks
from rank_programs import updating

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_totals_and_counts_give_the_weights_of_one_plain_process(
    run_ranks: RunRanks, ranks: int
) -> None:
    for name, clip_norm in (("ddp", None), ("fsdp", 0.05)):
        of_ranks = run_ranks(updating.weights_after_counted_steps, ranks, name, clip_norm)
        plain = updating.plain_weights_after_counted_steps(clip_norm)
        for weights in of_ranks:
            assert weights == pytest.approx(plain, abs=1e-6)
