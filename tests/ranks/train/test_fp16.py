"""fp16: steps that overflow are skipped by all ranks, and the run recovers."""

import pytest

from rank_group import RunRanks
from rank_programs import updating

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_scale_that_overflows_backs_off_and_the_run_recovers(
    run_ranks: RunRanks, name: str
) -> None:
    first, second = run_ranks(updating.overflowing, 2, name)
    assert first == second
    skipped = first["applied"].count(False)
    assert 3 <= skipped <= 20
    assert first["applied"] == [False] * skipped + [True] * (30 - skipped)
    assert first["overflowed"] == [True] * skipped + [False] * (30 - skipped)
    assert first["scales"][:skipped] == [2.0 ** (24 - n) for n in range(1, skipped + 1)]
    assert first["finite_norms"]
    assert first["loss"] < 1.2  # 1.43 before


def test_an_overflow_in_one_ranks_shard_is_seen_by_all(run_ranks: RunRanks) -> None:
    of_ranks = run_ranks(updating.an_overflow_in_one_shard, 2)
    assert of_ranks == [[False, True, True]] * 2
