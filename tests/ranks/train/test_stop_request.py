"""A signal to any one rank ends all of them after the same step."""

import pytest

from rank_group import RunRanks
from rank_programs import stopping

pytestmark = pytest.mark.ranks


def test_all_end_after_one_step_whoever_is_asked_whenever(run_ranks: RunRanks) -> None:
    rounds = list(zip(*run_ranks(stopping.at_random_moments, 4, 30), strict=True))
    assert len(rounds) == 30
    later = []  # than the step before the signal
    for ends in rounds:
        assert len({end.step for end in ends}) == 1, ends
        assert len({end.words for end in ends}) == 1, ends
        (asked,) = [rank for rank, end in enumerate(ends) if end.sent_at is not None]
        assert ends[0].words in (f"SIGTERM to rank {asked}", f"SIGUSR1 to rank {asked}")
        sent_at = ends[asked].sent_at
        assert sent_at is not None
        later.append(ends[0].step - sent_at)
    assert min(later) >= 1
    # The step in which the signal came, or the next; on a busy machine threads may have to wait.
    assert len([steps for steps in later if steps <= 2]) > 10, later


def test_a_signal_is_heard_while_a_collective_is_waited_for(run_ranks: RunRanks) -> None:
    heard = run_ranks(stopping.while_blocked, 3)
    assert [words for words, _ in heard] == ["SIGUSR1 to rank 0"] * 3  # before anybody went on
    assert [end.step for _, end in heard] == [1, 1, 1]
