"""Which attention to take at which length; one that computes something else is a failure."""

from dataclasses import replace

from syrupy.assertion import SnapshotAssertion

from made_up_records import ENVIRONMENT
from torchmuster.bench.attention import (
    AttentionAnswer,
    AttentionRequest,
    MeasuredAttention,
    attention_report,
    best_at,
    choose_attention,
)
from torchmuster.bench.report.report import Report, bench_screen
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status, exit_code

MIB = 1024**2


def one(kind: str, length: int, ms: float, *, mib: int = 1) -> MeasuredAttention:
    times = tuple(ms / 1e3 * factor for factor in (0.99, 1.0, 1.0, 1.0, 1.01, 1.01))
    return MeasuredAttention(
        kind=kind,
        length=length,
        forward_s=times,
        training_s=times,
        forward_bytes=mib * MIB,
        training_bytes=mib * MIB,
        error=1e-6,
    )


def answer(*measured: MeasuredAttention) -> AttentionAnswer:
    return AttentionAnswer(
        device="cpu",
        device_name="cpu",
        number_type="float32",
        threads=2,
        missing={"cudnn": "No viable backend for scaled_dot_product_attention was found"},
        measured=measured,
    )


TYPICAL = answer(
    one("plain", 128, 1.0),
    one("sdpa", 128, 1.5),
    one("flash", 128, 1.4),
    one("plain", 1024, 90.0, mib=64),
    one("sdpa", 1024, 30.5, mib=2),
    one("flash", 1024, 30.0, mib=2),
)


def reported(found: AttentionAnswer) -> Report:
    return attention_report(
        AttentionRequest(
            device="cpu",
            number_type="auto",
            lengths=(128, 1024),
            batch=1,
            heads=8,
            head_size=64,
            causal=True,
        ),
        found,
        where=Decision(value="cpu", reason="no GPU is visible here"),
        environment=ENVIRONMENT,
        settings={},
        date="2026-01-31T12:00:00+00:00",
        took_s=5,
    )


def finding(found: Report, name: str) -> Finding:
    (it,) = (it for it in found.findings if it.name == name)
    return it


def test_the_best_is_told_by_length_with_what_it_gives(snapshot: SnapshotAssertion) -> None:
    decided = choose_attention(TYPICAL)
    assert decided.value == "sdpa"  # as good as flash within 5 %, and nothing has to be set for it
    assert decided.reason == snapshot


def test_a_backend_that_is_clearly_faster_is_taken_by_name() -> None:
    found = answer(one("sdpa", 512, 10.0), one("flash", 512, 5.0), one("sdpa", 1024, 40.0))
    best = best_at(found.measured, 512)
    assert best is not None
    assert best.kind == "flash"


def test_a_backend_that_only_noise_makes_faster_is_not() -> None:
    noisy = tuple(0.01 * factor for factor in (0.6, 0.8, 1.0, 1.0, 1.4, 1.8))
    found = [replace(one("flash", 512, 8.0), training_s=noisy), one("sdpa", 512, 12.0)]
    best = best_at(found, 512)
    assert best is not None
    assert best.kind == "sdpa"


def test_wrong_outputs_are_a_failure_and_never_the_best(snapshot: SnapshotAssertion) -> None:
    wrong = replace(one("flash", 1024, 1.0), error=0.4, right=False)
    found = reported(answer(one("sdpa", 1024, 30.0), wrong))
    failure = finding(found, "attention-wrong-output")
    assert failure.status is Status.FAILURE
    assert failure == snapshot
    assert failure.evidence == "flash at 1024: off by 0.4"
    assert exit_code(found.findings) == 1
    assert found.choices[1].value == "sdpa"


def test_what_is_missing_or_left_out_is_said_with_its_reason(snapshot: SnapshotAssertion) -> None:
    out = [
        MeasuredAttention(kind=kind, length=length, left_out="out of memory")
        for length in (4096, 8192)
        for kind in ("plain", "math")
    ]
    only = replace(one("flex", 128, 1.0), training_s=(), forward_only="torch has no backward of it")
    found = reported(answer(one("sdpa", 128, 1.0), *out, only))
    assert "No viable backend" in finding(found, "attention-missing").why
    left_out = finding(found, "attention-left-out")
    assert (left_out.what, left_out.why) == (
        "skipped: plain, math at 4096, 8192",
        "out of memory",
    )
    assert left_out.fix == "muster bench attention --lengths 4096 8192"
    assert [row[0] for row in found.tables[0].rows] == ["128"]
    assert finding(found, "attention-forward-only") == snapshot


def test_the_report_shows_times_and_memory_by_length(snapshot: SnapshotAssertion) -> None:
    found = reported(TYPICAL)
    assert finding(found, "attention-same-output") == snapshot
    shown = bench_screen(found)
    assert "64.0 MiB" in shown
    assert "90.0 ms ±1%" in shown
    assert [it.title for it in found.pictures] == ["time by length", "memory by length"]
    assert len({it.key for it in found.record.series}) == 6 * 4
