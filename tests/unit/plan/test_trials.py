"""The largest micro-batch, from trials that are made up."""

import pytest

from made_up_plans import fsdp
from torchmuster.finding import Status
from torchmuster.plan.proof.real_ranks import RankSteps
from torchmuster.plan.proof.trials import (
    Trial,
    batch_size_finding,
    largest_batch,
    with_size,
)
from torchmuster.units import GiB


def trial(size: int, *, fits: bool) -> Trial:
    rank = RankSteps(
        rank=0,
        ran_out="" if fits else "out of memory",
        peaks_bytes=(GiB,),
        limit_bytes=2 * GiB,
    )
    return Trial(micro_batch_size=size, ranks=[rank])


@pytest.mark.parametrize(
    ("largest", "start", "most", "size", "tried"),
    [
        (4, 4, None, 4, [4, 8]),
        (10, 4, None, 8, [4, 8, 16]),
        (3, 8, None, 2, [8, 4, 2]),
        (0, 2, None, None, [2, 1]),
        (9, 4, 6, 6, [4, 6]),
        (99, 6, 6, 6, [6]),
    ],
)
def test_trials_go_up_or_down_from_the_plan(
    largest: int, start: int, most: int | None, size: int | None, tried: list[int]
) -> None:
    found, trials = largest_batch(
        lambda size: trial(size, fits=size <= largest), start=start, most=most
    )
    assert found == size
    assert [one.micro_batch_size for one in trials] == tried


def test_the_finding_has_the_settings() -> None:
    trials = [trial(4, fits=True), trial(8, fits=False)]
    finding = batch_size_finding(4, trials, fsdp(micro_batch_size=2), samples=None)
    assert finding.fix == "--set train.micro_batch_size=4 --set train.global_batch_size=32"
    assert "micro-batch 8: out of memory of 2.0 GiB on rank 0" in finding.evidence
    assert "micro-batch 4: fits; rank 0 uses 1.0 GiB of 2.0 GiB" in finding.evidence
    assert batch_size_finding(None, trials, fsdp(), samples=None).status is Status.FAILURE


def test_accumulation_follows_a_fixed_number_of_samples() -> None:
    assert with_size(fsdp(), 3, samples=8).accumulation == 3
