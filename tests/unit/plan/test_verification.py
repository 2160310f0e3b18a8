"""Predicted against measured: what is a failure, and what is verified of a plan for other hardware."""

import pytest

from made_up_plans import WORK, MadeUpModel, fsdp, hardware
from torchmuster.errors import Impossible
from torchmuster.finding import Status
from torchmuster.plan.proof import verification
from torchmuster.plan.proof.real_ranks import RankSteps
from torchmuster.units import GiB


def measured(memory_gib: float, step_s: float) -> list[RankSteps]:
    peak = int(memory_gib * GiB)
    return [
        RankSteps(rank=rank, device="cpu", peaks_bytes=(peak, peak), step_s=(step_s, step_s))
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("memory_gib", "step_s", "statuses"),
    [
        (10.0, 1.0, [Status.OK, Status.OK]),
        (10.4, 1.4, [Status.OK, Status.OK]),
        (8.0, 0.1, [Status.NOTE, Status.NOTE]),
        (11.0, 9.0, [Status.FAILURE, Status.WARNING]),
    ],
)
def test_more_memory_than_planned_is_a_failure(
    memory_gib: float, step_s: float, statuses: list[Status]
) -> None:
    predicted = verification.Predicted(candidate=fsdp(2), tensor_bytes=10 * GiB, step_s=1.0)
    findings = list(verification.findings_of(predicted, measured(memory_gib, step_s)))
    assert [finding.status for finding in findings] == statuses


def test_a_plan_for_other_hardware_is_verified_with_a_few_layers() -> None:
    model = MadeUpModel(sample_gib=8)
    substitute = verification.substitute_model(
        WORK, fsdp(64), here=hardware(cards=2), trace=model.trace
    )
    assert substitute.blocks == 4
    assert substitute.candidate.layout.shards == 2
    assert substitute.substitute.startswith("4 of 32 layers, fsdp on 2 ranks of made-up")
    with pytest.raises(Impossible, match="cannot be verified"):
        verification.substitute_model(
            WORK, fsdp(64), here=hardware(cards=2, memory_gib=1), trace=model.trace
        )
