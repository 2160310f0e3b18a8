"""One rank goes first, the others wait without a collective."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import queueing

pytestmark = pytest.mark.ranks


def test_rank_0_or_the_first_of_each_node_comes_first_every_time(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    of_ranks = run_ranks(queueing.take_turns, 4, str(tmp_path))
    assert (
        of_ranks
        == [
            [
                "name 0: 0 of 2",
                "name 1: 2 of 2",
                "node 0: 0 of 2",
                "node 1: 2 of 2",
                "turn 0: 0 of 4",
                "turn 1: 0 of 4",
                "turn 2: 0 of 4",
            ]
        ]
        * 4
    )


def test_a_failure_of_the_first_reaches_the_others_at_once(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    own, others = run_ranks(queueing.the_first_fails, 2)
    assert own == "no route to the hub"
    for fact in ("rank 1 ", "rank 0: ", "ConnectionError: no route to the hub"):
        assert fact in others
    assert others == snapshot
