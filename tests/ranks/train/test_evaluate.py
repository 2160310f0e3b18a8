"""Evaluation on several ranks gives what one process gives."""

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import evaluating

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_sample_counts_once_whatever_the_number_of_samples_and_ranks(
    run_ranks: RunRanks, ranks: int
) -> None:
    of_ranks = run_ranks(evaluating.every_size, ranks)
    for one in of_ranks:
        assert str(one) == str(of_ranks[0])
    for name, answers in of_ranks[0].items():
        for size, numbers in zip(evaluating.SIZES, answers, strict=True):
            plain = evaluating.one_process(size)
            assert numbers == pytest.approx(plain, abs=1e-6, nan_ok=True), (name, size)


def test_all_ranks_evaluate_with_the_statistics_of_rank_0(run_ranks: RunRanks) -> None:
    of_ranks = run_ranks(evaluating.own_statistics, 2)
    for name in ("ddp", "fsdp"):
        for numbers in (one[name] for one in of_ranks):
            # Rank 0's are mean 0 and variance 1, so each sample stays what it is.
            assert numbers == pytest.approx({"value": 2.5}, abs=1e-4)


def test_what_cannot_be_evaluated_is_said(run_ranks: RunRanks, snapshot: SnapshotAssertion) -> None:
    [said] = run_ranks(evaluating.refusal, 1)
    assert "'a'" in said
    assert "2 samples" in said
    assert said == snapshot
