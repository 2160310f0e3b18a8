"""What a report on memory says of made-up measurements."""

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.environment import Environment
from torchmuster.bench.memory import (
    PARTS,
    MeasuredMemory,
    MemoryAnswer,
    OfPrecision,
    RecomputeMode,
    StageTaken,
    forecast_stages,
)
from torchmuster.bench.memory_report import memory_report
from torchmuster.bench.report.report import Report, bench_screen
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import MiB

HERE = Environment(
    host="gpu-server",
    system="Linux",
    cpu="a processor",
    cores=4,
    threads=None,
    memory_bytes=None,
    devices=(),
    driver=None,
    torch="2.13",
    python="3.11",
    torchmuster="0",
)


def stage(name: str, step: int, before: int, peak: int, after: int, *parts: int) -> StageTaken:
    return StageTaken(
        name=name,
        step=step,
        micro_batch=0,
        before_bytes=before * MiB,
        peak_bytes=peak * MiB,
        after_bytes=after * MiB,
        parts=dict(zip(PARTS, (one * MiB for one in parts), strict=True)),
    )


def way(recompute: object, blocks: int, peak: int | None, step_s: float) -> RecomputeMode:
    times = () if peak is None else (step_s,) * 3
    size = None if peak is None else peak * MiB
    return RecomputeMode(recompute=recompute, blocks=blocks, peak_bytes=size, step_s=times)  # type: ignore[arg-type]


STAGES = (
    stage("model built", 0, 0, 10, 10, 10, 0, 0, 0),
    stage("forward", 2, 30, 80, 80, 10, 0, 20, 50),
    stage("backward", 2, 80, 100, 45, 10, 10, 20, 5),
    stage("optimizer step", 2, 45, 50, 30, 10, 0, 20, 0),
)
ANSWER = MemoryAnswer(
    rank=0,
    device="cpu",
    limit_bytes=None,
    precision="fp32",
    precision_reason="fp32",
    parameter_count=2_500_000,
    blocks=4,
    stages=(
        OfPrecision(precision="fp32", stages=STAGES),
        OfPrecision(precision="bf16", stages=(stage("backward", 2, 50, 75, 45, 10, 10, 20, 5),)),
    ),
    ways=(
        way("full", 4, 60, 0.2),
        way(2, 2, 65, 0.15),
        way("selective", 4, 90, 0.13),
        way("none", 0, 100, 0.1),
    ),
)
MEASURED = MeasuredMemory(
    answer=ANSWER, model="a model", micro_batch_size=8, limit_bytes=None, planned_bytes={}
)


def made(measured: MeasuredMemory) -> Report:
    return memory_report(
        measured,
        where=Decision(value="cpu", reason="no GPU is visible here"),
        environment=HERE,
        settings={},
        date="2026-01-31T12:00:00+00:00",
        took_s=5.0,
    )


def finding(measured: MeasuredMemory, name: str) -> Finding:
    (found,) = [one for one in made(measured).findings if one.name == name]
    return found


def test_the_screen_has_stages_ways_the_choice_and_the_verdicts(
    snapshot: SnapshotAssertion,
) -> None:
    shown = bench_screen(made(MEASURED), width=100)
    assert "step 2: backward" in shown
    assert "every 2nd block" in shown
    assert "train.activation_checkpointing: 2" in shown
    assert shown == snapshot


def test_where_the_peak_is_and_what_makes_it_is_said(snapshot: SnapshotAssertion) -> None:
    found = finding(MEASURED, "memory-peak")
    assert "100 MiB" in found.what
    assert found == snapshot


def test_precisions_are_compared_by_their_peaks(snapshot: SnapshotAssertion) -> None:
    found = finding(MEASURED, "memory-precision")
    assert "-25" in found.what
    assert found == snapshot


def test_a_plan_that_is_right_is_confirmed_and_one_that_is_wrong_is_not(
    snapshot: SnapshotAssertion,
) -> None:
    right = replace(MEASURED, planned_bytes={"none": 101 * MiB, "full": 60 * MiB})
    assert finding(right, "memory-plan").status is Status.OK
    wrong = replace(MEASURED, planned_bytes={"none": 100 * MiB, "full": 40 * MiB})
    found = finding(wrong, "memory-plan")
    assert found.status is Status.WARNING
    assert "+50" in found.what
    assert "--find-batch-size" in found.fix
    assert found == snapshot


def test_why_there_is_no_plan_is_said(snapshot: SnapshotAssertion) -> None:
    told = replace(MEASURED, not_planned="the model reads values")
    found = finding(told, "memory-plan")
    assert found.what.endswith(": the model reads values")
    assert found == snapshot


def test_where_nothing_stays_within_the_limit_the_bench_fails_and_says_what_is_missing(
    snapshot: SnapshotAssertion,
) -> None:
    tight = replace(MEASURED, limit_bytes=50 * MiB)
    found = finding(tight, "memory-limit")
    assert found.status is Status.FAILURE
    assert "10.0 MiB" in found.what
    assert "train.micro_batch_size=4" in found.fix
    assert found == snapshot
    assert made(tight).record.facts["best"] is None


def test_what_did_not_fit_is_unknown_and_not_zero() -> None:
    ways = (*ANSWER.ways[:-1], way("none", 0, None, 0))
    scarce = replace(
        MEASURED,
        answer=replace(
            ANSWER, ways=ways, stages=(OfPrecision(precision="fp32", stages=()), ANSWER.stages[1])
        ),
    )
    told = made(scarce)
    assert finding(scarce, "memory-peak").status is Status.WARNING
    row = told.tables[1].rows[-1]
    assert row == ("nothing", "0", "does not fit", "-", "-", "-", "-", "-")
    assert told.record.facts["did_not_fit"] == ["none"]
    named = [one for one in told.record.series if one.labels.get("recompute") == "none"]
    assert named == []


def test_a_model_without_repeated_layers_is_told_so() -> None:
    plain = replace(MEASURED, answer=replace(ANSWER, blocks=0, ways=ANSWER.ways[-1:]))
    assert "no repeated layers" in finding(plain, "memory-no-blocks").what
    assert [one.value for one in made(plain).choices] == ["measured on cpu"]


def test_the_record_has_every_stage_and_way_and_the_pictures_are_there() -> None:
    told = made(MEASURED)
    names = {(one.name, one.unit) for one in told.record.series}
    assert names == {("stage_peak", "B"), ("peak", "B"), ("step", "s")}
    assert len(told.record.series) == 5 + 2 * 4
    assert [one.title for one in told.pictures] == ["memory by stage", "peak and time"]
    assert all(one.svg.startswith("<svg") for one in told.pictures)


@pytest.mark.parametrize(("blocks", "asked"), [(8, ["full", 2, "none"]), (80, ["full", "none"])])
def test_of_a_deep_model_only_the_ends_are_forecast(blocks: int, asked: list[object]) -> None:
    requests: list[TraceRequest] = []

    def look(some: list[TraceRequest]) -> list[TraceRefused]:
        requests.extend(some)
        return [TraceRefused(what="it reads values") for _ in some]

    found = forecast_stages(
        Work(),
        Candidate(strategy="single", layout=ShardLayout(copies=1, shards=1)),
        ["full", 2, "none"],
        blocks=blocks,
        kernels="cpu",
        look=look,  # type: ignore[arg-type]
    )
    assert [one.candidate.recompute for one in requests] == asked
    assert (found.planned_bytes, found.not_planned) == ({}, "it reads values")
