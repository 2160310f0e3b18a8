"""Predicted against measured, and the largest micro-batch, with real steps that are made up."""

from dataclasses import replace

import pytest

from made_up_plans import MadeUpModel, fsdp, hardware, question
from torchmuster.errors import OutOfMemory
from torchmuster.finding import Status
from torchmuster.plan import real_steps
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.real_steps import RankSteps, compare_steps, find_batch_size, largest_batch
from torchmuster.plan.search import make_plan
from torchmuster.units import GiB


@pytest.mark.parametrize(
    ("memory_gib", "step_s", "status"),
    [
        (10.0, 1.0, Status.OK),
        (10.4, 1.4, Status.OK),
        (8.0, 0.1, Status.OK),
        (10.0, 9.0, Status.WARNING),
        (11.0, 9.0, Status.FAILURE),
    ],
)
def test_more_memory_than_planned_is_a_failure(
    memory_gib: float, step_s: float, status: Status
) -> None:
    best = make_plan(question(hardware(cards=2)), MadeUpModel(parameters=10**8).trace).chosen.value
    assert best.time is not None
    planned = replace(
        best,
        memory=replace(best.memory, tensor_bytes=10 * GiB),
        time=replace(best.time, step_s=1.0),
    )
    peak = int(memory_gib * GiB)
    measured = [RankSteps(rank=0, peaks_bytes=(peak, peak), step_s=(step_s, step_s))]
    finding = compare_steps(planned, hardware(cards=2), measured)
    assert finding.status is status
    assert finding.what.startswith("tensors: predicted 10.0 GiB, measured ")


@pytest.mark.parametrize(
    ("largest", "start", "most", "size", "tried"),
    [
        (4, 4, 2**20, 4, [4, 8]),
        (10, 4, 2**20, 8, [4, 8, 16]),
        (3, 8, 2**20, 2, [8, 4, 2]),
        (0, 2, 2**20, None, [2, 1]),
        (9, 4, 6, 6, [4, 6]),
        (99, 6, 6, 6, [6]),
    ],
)
def test_trials_go_up_or_down_from_the_plan(
    largest: int, start: int, most: int, size: int | None, tried: list[int]
) -> None:
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= largest

    assert largest_batch(fits, start=start, most=most) == size
    assert sizes == tried


def test_the_weakest_rank_decides_and_the_finding_has_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(work: Work, candidate: Candidate, **_: object) -> list[RankSteps]:
        if candidate.micro_batch_size > 4:
            raise OutOfMemory("it ran out of memory on rank 1")
        return [RankSteps(rank=0, peaks_bytes=(GiB,))]

    monkeypatch.setattr(real_steps, "run_real_steps", run)
    work, planned = question().work, fsdp(micro_batch_size=2)
    finding = find_batch_size(work, planned, device="gpu", samples=None)
    assert finding.fix == "--set train.micro_batch_size=4 --set train.global_batch_size=32"
    assert "out of memory on rank 1" in finding.evidence
    assert "micro-batch 4 fits: a rank uses 1.0 GiB" in finding.evidence


def test_accumulation_follows_a_fixed_number_of_samples() -> None:
    assert real_steps.with_size(fsdp(), 3, samples=8).accumulation == 3
