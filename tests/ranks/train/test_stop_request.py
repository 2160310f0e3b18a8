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


@pytest.mark.nightly
def test_all_end_after_one_step_in_special_situations(run_ranks: RunRanks) -> None:
    of_ranks = run_ranks(stopping.in_special_situations, 4)
    for situation in of_ranks[0]:
        ends = [of_rank[situation] for of_rank in of_ranks]
        assert len({end.step for end in ends}) == 1, (situation, ends)
        assert len({end.words for end in ends}) == 1, (situation, ends)
    assert of_ranks[0]["before the first"].step == 1
    assert of_ranks[0]["the last"].step == 3
    fast, slow = of_ranks[0]["a slow rank"], of_ranks[3]["a slow rank"]
    assert fast.sent_at is not None
    # It did four steps in the time of one: it caught up, instead of ending where it was.
    assert slow.step > fast.sent_at > 0


def test_a_signal_is_heard_while_a_collective_is_waited_for(run_ranks: RunRanks) -> None:
    heard = run_ranks(stopping.while_blocked, 3)
    assert [words for words, _ in heard] == ["SIGUSR1 to rank 0"] * 3  # before anybody went on
    assert [end.step for _, end in heard] == [1, 1, 1]


@pytest.mark.nightly
def test_who_cannot_be_followed_ends_at_once_or_goes_on(run_ranks: RunRanks) -> None:
    assert run_ranks(stopping.when_others_are_gone, 2) == [[143], []]
    assert run_ranks(stopping.when_the_store_is_gone, 2) == [([], False), ([143], False)]
    assert run_ranks(stopping.when_one_is_killed, 2) == [False, False]


@pytest.mark.nightly
def test_a_rank_that_cannot_answer_at_once_is_waited_for_and_may_be_asked_again(
    run_ranks: RunRanks,
) -> None:
    """All ranks drop a request that is not answered in time; the next one is another."""
    for found in run_ranks(stopping.when_one_cannot_answer_at_once, 3):
        assert found == [False, True, "SIGUSR1 to rank 0", []]
