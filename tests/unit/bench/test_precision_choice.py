"""The fastest precision that learns as well as fp32 is taken, and the reason says what was passed over."""

from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_records import ENVIRONMENT
from torchmuster.bench.precision import (
    SMALL_GPT,
    PrecisionAnswer,
    PrecisionRequest,
    PrecisionRun,
    allowed_difference,
    choose_fastest_precision,
    precision_report,
    units_of_cpu,
)
from torchmuster.bench.report.report import Report, bench_screen
from torchmuster.decision import Decision
from torchmuster.finding import Status

MIB = 1024**2


def way(precision: str, step_s: float, *, loss: float | None = 2.0, mib: int = 100) -> PrecisionRun:
    return PrecisionRun(
        precision=precision,
        step_s=tuple(step_s * factor for factor in (0.99, 0.995, 1.0, 1.0, 1.0, 1.005, 1.01)),
        peak_bytes=mib * MIB,
        losses=(4.0, 3.0, loss),
        held_loss=loss,
        output_error=1e-3,
        skipped=0,
    )


def answer(*ways: PrecisionRun, other_order: float | None = 2.01) -> PrecisionAnswer:
    return PrecisionAnswer(
        device="cpu",
        device_name="cpu",
        parameter_count=2_000_000,
        ways=(way("fp32", 0.1), *ways),
        missing={"tf32": "a mode of accelerators' float32 units"},
        other_order_loss=other_order,
    )


def reported(found: PrecisionAnswer) -> Report:
    return precision_report(
        PrecisionRequest(
            device="cpu", work=SMALL_GPT, micro_batch_size=8, steps=3, rounds=7, study=False
        ),
        found,
        where=Decision(value="cpu", reason="no GPU is visible here"),
        units=None,
        environment=ENVIRONMENT,
        settings={},
        date="2026-01-31T12:00:00+00:00",
        took_s=5,
    )


def test_what_is_faster_and_learns_as_well_is_taken_with_all_figures(
    snapshot: SnapshotAssertion,
) -> None:
    decided = choose_fastest_precision(answer(way("bf16", 0.05, loss=2.002, mib=60)), None)
    assert decided.value == "bf16"
    assert "+0.10%" in decided.reason
    assert decided.reason == snapshot


def test_fp32_stays_where_the_processor_has_no_unit_for_less(snapshot: SnapshotAssertion) -> None:
    decided = choose_fastest_precision(answer(way("bf16", 0.12)), {"bf16": (), "fp16": ()})
    assert decided.value == "fp32"
    assert "0.83 times" in decided.reason
    assert decided.reason == snapshot


def test_a_gain_that_may_be_noise_is_none(snapshot: SnapshotAssertion) -> None:
    times = tuple(0.09 * factor for factor in (0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4))
    noisy = replace(way("bf16", 0.08), step_s=times)
    decided = choose_fastest_precision(answer(noisy), None)
    assert decided.value == "fp32"
    assert decided.reason == snapshot


def test_bf16_is_taken_before_an_fp16_that_is_hardly_faster() -> None:
    assert (
        choose_fastest_precision(answer(way("bf16", 0.050), way("fp16", 0.049)), None).value
        == "bf16"
    )
    assert (
        choose_fastest_precision(answer(way("bf16", 0.050), way("fp16", 0.030)), None).value
        == "fp16"
    )


def test_what_learns_worse_than_another_order_of_the_data_would_is_refused() -> None:
    worse = way("bf16", 0.05, loss=2.2)
    decided = choose_fastest_precision(answer(worse), None)
    assert decided.value == "fp32"
    assert "bf16's loss differs by +10.0%" in decided.reason
    assert (
        choose_fastest_precision(answer(worse, other_order=1.7), None).value == "bf16"
    )  # 15 % off by itself
    warned = {one.name: one for one in reported(answer(worse)).findings}
    assert warned["precision-bf16-other-loss"].status is Status.WARNING
    assert warned["precision-bf16-other-loss"].why.endswith("changes it by +0.50%")


def test_numbers_that_are_not_finite_are_refused_and_named(snapshot: SnapshotAssertion) -> None:
    bad = replace(way("fp16", 0.02, loss=None), trouble="step 0: rank 0's layer mlp gave Inf")
    decided = choose_fastest_precision(answer(bad), None)
    assert decided.value == "fp32"
    assert decided.reason == snapshot
    found = reported(answer(bad))
    (warning,) = (one for one in found.findings if one.name == "precision-fp16-not-finite")
    assert warning == snapshot
    assert "not finite" in bench_screen(found)


def test_at_least_one_percent_is_allowed() -> None:
    assert allowed_difference(answer(other_order=2.0)) == 0.01
    assert allowed_difference(answer(other_order=None)) == 0.01
    assert allowed_difference(answer(other_order=1.9)) == pytest.approx(0.05)


def test_the_report_has_a_row_for_each_precision_and_says_what_to_set() -> None:
    found = reported(answer(way("bf16", 0.05, mib=60)))
    assert [row[0] for row in found.tables[0].rows] == ["fp32", "bf16"]
    assert found.findings[-1].what == "train.precision: bf16"
    assert "a small GPT (2 million parameters)" in found.question
    names = {(one.name, one.labels["precision"]) for one in found.record.series}
    assert ("step", "bf16") in names
    assert ("tensors at the peak", "fp32") in names


@pytest.mark.parametrize(
    ("text", "units"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n",
            {"bf16": ("AMX", "AVX-512 BF16"), "fp16": ()},
        ),
        ("flags : fpu avx2\n", {"bf16": (), "fp16": ()}),
        ("Features : fp asimdhp bf16\n", {"bf16": ("BF16 of Arm",), "fp16": ("FP16 of Arm",)}),
        ("processor : 0\n", None),
    ],
)
def test_the_processors_units_are_read_from_its_flags(
    tmp_path: Path, text: str, units: dict[str, tuple[str, ...]] | None
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert units_of_cpu(tmp_path / "cpuinfo") == units
    assert units_of_cpu(tmp_path / "missing") is None
