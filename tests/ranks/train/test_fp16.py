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


@pytest.mark.nightly
def test_rank_0_warns_when_fp16_does_not_suffice(run_ranks: RunRanks) -> None:
    first, second = run_ranks(updating.warnings_of_fp16, 2)
    # Lowered from 4 to 2, 1 and 0.5: the last two were no longer a matter of the scale.
    assert first == [
        "fp16: the loss scale has fallen to 0.5: gradients are not finite even unscaled, so a smaller "
        "scale cannot help; look for the cause in the data or the model, lower the learning rate, or "
        "use bf16 or fp32",
        "fp16: 7 of 105 steps were skipped because gradients overflowed, which is more than 5% (the "
        "loss scale is 0.03125); lower the learning rate, clip gradients, or use bf16 or fp32",
        "overflowed: [True, True, False, False, False, False, False, False]",
    ]
    assert second == first[-1:]
