"""What ranks tell each other."""

import pytest

from rank_group import RunRanks
from rank_programs import meeting

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_hears_all_in_order_and_gets_the_same_sums(
    run_ranks: RunRanks, ranks: int
) -> None:
    words = ["short", "a much longer word", "größe"][:ranks]
    answers = run_ranks(meeting.say_and_add, ranks, words)
    assert answers == [(words, [float(ranks), float(sum(range(ranks)))])] * ranks
