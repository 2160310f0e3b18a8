"""What measured products mean: shares of a sourced peak, what is wrong with them, which number type to take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_records import ENVIRONMENT
from torchmuster.bench import record
from torchmuster.bench.matmul import (
    MatmulAnswer,
    Product,
    best_type,
    matmul_report,
    rate_of,
    speed_ups,
    squares,
)
from torchmuster.bench.report.report import Report, bench_page, bench_screen
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status, exit_code

TERA = 1e12


def product(size: int, number_type: str, flops_s: float, *, on_cpu: bool = False) -> Product:
    (shape,) = squares((size,))
    call_s = shape.flops / flops_s
    return Product(
        shape=shape,
        number_type=number_type,
        on_cpu=on_cpu,
        call_s=tuple(call_s * factor for factor in (0.99, 0.995, 1.0, 1.0, 1.0, 1.005, 1.01)),
        error=1e-6,
    )


def answer(products: Sequence[Product], name: str = "NVIDIA H100 80GB HBM3") -> MatmulAnswer:
    return MatmulAnswer(
        device="cpu" if name == "cpu" else "cuda:0",
        device_name=name,
        threads=2,
        products=tuple(products),
        missing_types={},
    )


def reported(found: MatmulAnswer) -> Report:
    return matmul_report(
        found,
        where=Decision(value="gpu", reason="visible: GPU 0"),
        environment=ENVIRONMENT,
        settings={},
        date="2026-01-31T12:00:00+00:00",
        took_s=5,
    )


def finding(found: Report, name: str) -> Finding:
    (one,) = (one for one in found.findings if one.name == name)
    return one


def test_the_share_of_a_sourced_peak_is_told_with_its_source(snapshot: SnapshotAssertion) -> None:
    found = reported(answer([product(4096, "bfloat16", 700 * TERA)]))
    share = finding(found, "matmul-share-of-peak")
    assert share.what == "share of the peak: bfloat16 71% at 4096"  # of 989.4 TFLOP/s
    assert "torchtitan" in share.evidence
    assert share == snapshot
    assert exit_code(found.findings) == 0


def test_more_than_the_peak_is_an_error_and_no_figure(snapshot: SnapshotAssertion) -> None:
    found = reported(answer([product(4096, "float32", 100 * TERA)]))  # the peak is 67
    above = finding(found, "matmul-above-peak")
    assert above.status is Status.FAILURE
    assert above == snapshot
    assert "data sheet" in above.fix
    assert exit_code(found.findings) == 1


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1", "cpu"])
def test_a_peak_that_nobody_gives_stays_unknown(name: str, snapshot: SnapshotAssertion) -> None:
    found = reported(answer([product(1024, "float32", TERA, on_cpu=name == "cpu")], name))
    unknown = finding(found, "matmul-peak-unknown")
    assert unknown.status is Status.NOTE
    assert unknown == snapshot
    assert "peak" not in found.tables[0].note
    assert found.tables[0].rows[0][1].endswith("±1%")  # and no share after it


def test_tf32_is_not_measured_against_the_peak_of_float32() -> None:
    rate = rate_of(product(4096, "tf32", 400 * TERA), None)
    assert rate.share is None
    found = reported(answer([product(4096, "tf32", 400 * TERA)]))
    assert "matmul-above-peak" not in {one.name for one in found.findings}


def test_wrong_values_are_a_failure_with_what_was_seen() -> None:
    good = product(128, "float32", TERA)
    bad = replace(product(256, "float32", TERA), error=0.3, right=False)
    found = reported(answer([good, bad]))
    wrong = finding(found, "matmul-wrong-values")
    assert wrong.status is Status.FAILURE
    assert wrong.evidence == "256 float32: off by 0.3"


def test_what_was_left_out_is_said_with_the_line_that_measures_it(
    snapshot: SnapshotAssertion,
) -> None:
    (shape,) = squares((4096,))
    out = Product(
        shape=shape,
        number_type="float32",
        on_cpu=True,
        left_out="one product would take about 1.2 s",
    )
    found = reported(answer([product(128, "float32", TERA, on_cpu=True), out], "cpu"))
    left_out = finding(found, "matmul-left-out")
    assert left_out.why == out.left_out
    assert left_out.fix == "muster bench matmul --sizes 4096"
    assert left_out == snapshot


def test_rates_that_vary_much_come_with_a_warning() -> None:
    (shape,) = squares((128,))
    times = tuple(0.001 * factor for factor in (0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.5))
    noisy = Product(shape=shape, number_type="float32", on_cpu=True, call_s=times, error=0.0)
    warning = finding(reported(answer([noisy], "cpu")), "matmul-noisy")
    assert warning.status is Status.WARNING
    assert "measure again" in warning.fix


@pytest.mark.parametrize(
    ("bfloat16", "chosen", "reason"),
    [
        (3.0, "bfloat16", "multiplies these shapes 3 times as fast as float32"),
        (1.05, "float32", "no other dtype is much faster for these shapes (bfloat16 1.05 times)"),
        (0.5, "float32", "no other dtype is much faster for these shapes (bfloat16 0.5 times)"),
    ],
)
def test_a_number_type_is_chosen_where_it_gains_enough(
    bfloat16: float, chosen: str, reason: str
) -> None:
    products = [product(512, "float32", TERA), product(512, "bfloat16", bfloat16 * TERA)]
    decided = best_type([rate_of(one, None) for one in products])
    assert decided.value == chosen
    assert decided.reason.startswith(reason)


def test_only_shapes_that_all_types_have_are_compared() -> None:
    # float32 was left out at 2048, where bfloat16 has taken long.
    products = [
        product(512, "float32", TERA),
        product(512, "bfloat16", 2 * TERA),
        product(2048, "bfloat16", 2 * TERA),
    ]
    assert "2 times as fast" in best_type([rate_of(one, None) for one in products]).reason


def test_the_accelerator_is_held_against_the_cpu_of_the_same_machine() -> None:
    products = [
        product(128, "float32", TERA),
        product(128, "float32", 2 * TERA, on_cpu=True),
        product(1024, "float32", 40 * TERA),
        product(1024, "float32", TERA, on_cpu=True),
    ]
    gains = speed_ups([rate_of(one, None) for one in products])
    assert [size for size, _ in gains["float32"]] == [128, 1024]
    assert [gain for _, gain in gains["float32"]] == pytest.approx([0.5, 40.0])
    found = reported(answer(products))
    assert "speed-up over the CPU" in [one.title for one in found.pictures]
    assert "float32 on CPU" in bench_screen(found)


def test_the_record_has_a_series_for_each_product_and_can_be_written() -> None:
    found = reported(answer([product(128, "float32", TERA), product(128, "bfloat16", TERA)]))
    assert {one.labels["type"] for one in found.record.series} == {"float32", "bfloat16"}
    assert all(one.unit == "FLOP/s" and one.better == "higher" for one in found.record.series)
    assert b'"matmul"' in record.encode_record(found.record)
    assert "<svg" in bench_page(found)
