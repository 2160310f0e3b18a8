"""A plan beside real steps: which figures are compared, what the verdict means, and what stands for other hardware."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.finding import Status
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof.verification import (
    Predicted,
    RankSteps,
    Verified,
    compare_with_plan,
    is_here,
    smaller_layout,
    substitute_model,
)
from torchmuster.plan.record import Peak, TraceRecord, TraceRequest
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB, MiB

LINK = Link(latency_s=1e-5, bytes_s=1e9)
WORK = Work(build="own:model", dataset="own:data")
DDP = Candidate(strategy="ddp", layout=ShardLayout(copies=16, shards=1), micro_batch_size=4)
HYBRID = Candidate(strategy="fsdp", layout=ShardLayout(copies=4, shards=8))


def hardware(*, kind: str = "cpu", cards: int = 2, memory_bytes: int = 8 * GiB) -> Hardware:
    card = Gpu(
        name=f"a {kind}", memory_bytes=memory_bytes, flops={}, bandwidth_bytes_s=None, kind=kind
    )
    return Hardware(card=card, machines=1, cards_per_machine=cards, within=LINK, between=LINK)


def seen(rank: int, peak_bytes: int, *step_s: float) -> RankSteps:
    fields: dict[str, Any] = dict.fromkeys(RankSteps.__dataclass_fields__, 0.0)
    fields |= {"rank": rank, "device": "cpu", "peaks_bytes": (0, peak_bytes, 2 * peak_bytes)}
    fields |= {"reserved_bytes": None, "step_s": step_s}
    return RankSteps(**fields)


def verified(measured: Sequence[RankSteps], **predicted: Any) -> Verified:
    def measure(
        work: Work,
        candidate: Candidate,
        *,
        ranks: int,
        device: str,
        steps: int,
        blocks: int | None,
    ) -> Sequence[RankSteps]:
        assert (ranks, device, blocks) == (2, "cpu", None)
        return measured

    two = smaller_layout(DDP, 2)
    expected = {"work": WORK, "candidate": two, "blocks": None, "tensor_bytes": GiB, **predicted}
    return compare_with_plan(Predicted(**expected), device="cpu", measure=measure)


def test_what_is_as_predicted(snapshot: SnapshotAssertion) -> None:
    found = verified(
        [seen(0, GiB, 1.0, 2.0, 1.0), seen(1, GiB + MiB, 2.0, 1.0, 5.0)], step_s=1.9
    ).findings
    assert [one.status for one in found] == [Status.OK, Status.OK]
    assert found == snapshot


@pytest.mark.parametrize(
    ("peak_bytes", "status", "words"),
    [
        (1.04, Status.OK, "(+4.0 %), within 5 %"),
        (1.2, Status.FAILURE, "(+20.0 %), more than 5 % above the prediction"),
        (0.8, Status.NOTE, "(-20.0 %), more than 5 % below the prediction"),
    ],
)
def test_verdicts_on_memory(peak_bytes: float, status: Status, words: str) -> None:
    (found,) = verified([seen(0, int(peak_bytes * GiB))] * 2).findings
    assert found.status is status
    assert found.what.endswith(words)
    if status is Status.FAILURE:
        assert "leave +20.0 % more free memory" in found.fix


def test_slower_than_predicted_is_a_warning(snapshot: SnapshotAssertion) -> None:
    _, found = verified([seen(0, GiB, 3.0), seen(1, GiB, 3.0)], step_s=2.0).findings
    assert found.status is Status.WARNING
    assert "+50.0 %" in found.what
    assert found == snapshot


def test_what_stands_for_other_hardware_is_named() -> None:
    found = verified([seen(0, GiB)] * 2, instead="4 of 32 layers").findings
    assert found[-1].status is Status.NOTE
    assert found[-1].what == "verified here: 4 of 32 layers"


def test_a_plan_for_this_machine_is_tried_as_it_is() -> None:
    two = smaller_layout(DDP, 2)
    assert is_here(hardware(), hardware(), two)
    assert not is_here(hardware(kind="cuda"), hardware(), two)
    assert not is_here(hardware(cards=16), hardware(), DDP)


@pytest.mark.parametrize(
    ("candidate", "ranks", "strategy", "layout"),
    [
        (DDP, 2, "ddp", (2, 1)),
        (DDP, 1, "single", (1, 1)),
        (HYBRID, 4, "fsdp", (2, 2)),
        (HYBRID, 2, "fsdp", (1, 2)),
        (HYBRID, 1, "fsdp", (1, 1)),
    ],
)
def test_the_same_way_on_fewer_ranks(
    candidate: Candidate, ranks: int, strategy: str, layout: tuple[int, int]
) -> None:
    small = smaller_layout(candidate, ranks)
    assert (small.strategy, (small.layout.copies, small.layout.shards)) == (strategy, layout)


def record(request: TraceRequest, peak_bytes: int) -> TraceRecord:
    peak = Peak(
        phase="forward",
        micro_batch=0,
        block=None,
        after_block=None,
        peak_bytes=peak_bytes,
        by_category={},
        operation="",
        module="",
    )
    return TraceRecord(
        request=request,
        torch="2.13",
        blocks_traced=request.blocks or 32,
        blocks=32,
        blocks_alike=True,
        parameters=(),
        parameter_count=0,
        trained_count=0,
        samples_per_micro_batch=1,
        tokens_per_sample=None,
        states={},
        first_step_peak_bytes=0,
        peaks=(peak,),
        timeline=(),
        host_bytes=0,
    )


def test_as_many_layers_as_there_is_room_for(snapshot: SnapshotAssertion) -> None:
    def look(requests: Sequence[TraceRequest]) -> list[TraceRecord]:
        return [record(one, (one.blocks or 0) * GiB) for one in requests]

    found = substitute_model(WORK, DDP, here=hardware(), ranks=2, look=look)  # 4 GiB for each rank
    assert (found.blocks, found.tensor_bytes, found.candidate.micro_batch_size) == (4, 4 * GiB, 1)
    assert found.instead == snapshot
    tight = hardware(memory_bytes=5 * GiB)
    assert substitute_model(WORK, DDP, here=tight, ranks=2, look=look).blocks == 2
    with pytest.raises(Impossible) as refused:
        substitute_model(WORK, DDP, here=hardware(memory_bytes=GiB), ranks=2, look=look)
    assert refused.value == snapshot


@pytest.mark.parametrize(("planned", "tried"), [(1, 1), (2, 2), (64, 2)])
def test_many_micro_batches_are_stood_for_by_two(planned: int, tried: int) -> None:
    asked: list[TraceRequest] = []

    def look(requests: Sequence[TraceRequest]) -> list[TraceRecord]:
        asked.extend(requests)
        return [record(one, GiB) for one in requests]

    many = replace(DDP, accumulation=planned)
    found = substitute_model(WORK, many, here=hardware(), ranks=2, look=look)
    assert found.candidate.accumulation == tried
    assert {one.candidate.accumulation for one in asked} == {tried}


def test_what_cannot_be_traced_is_refused_by_name() -> None:
    with pytest.raises(Impossible, match="cannot be followed"):
        substitute_model(
            *(WORK, DDP),
            here=hardware(),
            ranks=2,
            look=lambda _: [TraceRefused(what="cannot be followed")],
        )
