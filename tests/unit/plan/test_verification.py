"""Predicted against measured: what is a failure."""

from dataclasses import replace

import pytest

from made_up_plans import MadeUpModel, hardware, question
from torchmuster.finding import Status
from torchmuster.plan.proof import verification
from torchmuster.plan.proof.real_ranks import RankSteps
from torchmuster.plan.search import make_plan
from torchmuster.units import GiB


def measured(memory_gib: float, step_s: float) -> list[RankSteps]:
    peak = int(memory_gib * GiB)
    return [
        RankSteps(rank=rank, peaks_bytes=(peak, peak), step_s=(step_s, step_s)) for rank in range(2)
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
    planned = make_plan(question(hardware(cards=2)), MadeUpModel(parameters=10**8).trace)
    best = planned.chosen.value
    assert best.time is not None
    forecast = replace(
        best,
        memory=replace(best.memory, tensor_bytes=10 * GiB),
        time=replace(best.time, step_s=1.0),
    )
    ranks = measured(memory_gib, step_s)
    findings = list(verification.findings_of(forecast, hardware(cards=2), ranks))
    assert [finding.status for finding in findings] == statuses
