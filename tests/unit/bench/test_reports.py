"""Reports of benches from made-up rows: the result, what to do, the plot; and the comparison of two records."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchmuster.bench import attention, collectives, compare, data, matmul, result, scaling, show
from torchmuster.bench.result import Record, Report, Row
from torchmuster.cli.main import main
from torchmuster.errors import ExitCode, Impossible


def product(device: str, dtype: str, size: int, seconds: float, error: float = 1e-7) -> Row:
    labels: dict[str, str | int] = {"device": device, "dtype": dtype, "size": size}
    return Row(labels=labels, seconds=(seconds,) * 3, figures={"error": error})


def step(ranks: int, seconds: float, alone: float) -> list[Row]:
    labels: dict[str, str | int] = {"ranks": ranks, "batch_size": 8}
    return [
        Row(labels={**labels, "timed": scaling.STEP}, seconds=(seconds,)),
        Row(labels={**labels, "timed": scaling.ALONE}, seconds=(alone,)),
    ]


def record(rows: Sequence[Row], bench: str = "matmul", cores: str = "8") -> Record:
    return Record(
        bench=bench,
        date="2026-01-31T12:00:00+00:00",
        host={"host": "gpu-server", "cores": cores},
        settings={"sizes": [128]},
        rows=tuple(rows),
        conclusion="fast <script>",
        advice="keep it",
    )


def chart_texts(report: Report) -> list[str]:
    (svg,) = report.charts.values()
    texts = [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.text]
    return [text.strip() for text in texts]


def test_matmul_compares_gpu_and_cpu() -> None:
    rows = [
        *(product("cuda", "float32", size, seconds) for size, seconds in ((128, 2e-5), (4096, 1e-2))),
        *(product("cuda", "bfloat16", size, seconds) for size, seconds in ((128, 2e-5), (4096, 1e-3))),
        *(product("cpu", "float32", size, seconds) for size, seconds in ((128, 1e-5), (4096, 1.0))),
    ]  # fmt: skip
    report = matmul.summarize(rows)
    assert "137 TFLOPS (bfloat16, size 4096, cuda)" in report.conclusion
    assert "up to 100 times as fast as the CPU (float32, size 4096, cuda)" in report.conclusion
    assert report.advice.startswith("train with train.precision: bf16")
    assert "Matrix products: speed-up of the GPU over the CPU" in chart_texts(report)
    assert report.findings == []


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_product_is_a_failure(error: float) -> None:
    report = matmul.summarize([product("cpu", "float32", 128, 1e-3, error)])
    (finding,) = report.findings
    assert finding.name == "matmul-wrong-values"
    assert "size 128" in finding.what


def test_scaling_has_only_measured_figures_and_names_the_larger_difference() -> None:
    communicating = scaling.summarize([*step(1, 0.10, 0.10), *step(2, 0.16, 0.11)])
    assert "1.25 times as fast as 1: an efficiency of 62%" in communicating.conclusion
    assert "exchanging gradients (50.0 ms of a step)" in communicating.advice
    assert communicating.tables[0].rows[1] == ("2", "160 ms", "110 ms", "100/s", "1.25", "62%")
    computing = scaling.summarize([*step(1, 0.10, 0.10), *step(2, 0.16, 0.17)])
    assert "takes 70.0 ms longer" in computing.advice
    good = scaling.summarize([*step(1, 0.10, 0.10), *step(2, 0.11, 0.10)])
    assert "no bottleneck" in good.advice
    assert {"measured", "ideal"} <= set(chart_texts(good))


def test_attention_that_could_not_be_measured_at_all_says_why() -> None:
    labels: dict[str, str | int] = {"implementation": "plain", "length": 128, "dtype": "bfloat16"}
    report = attention.summarize([Row(labels=labels, problem="CUDA out of memory")])
    assert report.conclusion.startswith("No implementation")
    (finding,) = report.findings
    assert (finding.name, finding.why) == ("attention-not-measured", "CUDA out of memory")


def test_collectives_recommend_the_smallest_fast_message() -> None:
    rows = []
    for size, bandwidth in ((4096, 1e6), (2**20, 9e8), (2**24, 1e9)):
        row = Row(labels={"operation": "all-reduce", "bytes": size, "ranks": 2}, seconds=(1e-3,))
        row.figures.update(bus_bytes_s=bandwidth, wrong_values=0)
        rows.append(row)
    report = collectives.summarize(rows)
    assert "1.00 GB/s of bus bandwidth" in report.conclusion
    assert "at least 1.0 MiB" in report.advice
    rows[1].figures["wrong_values"] = 2
    (finding,) = collectives.summarize(rows).findings
    assert finding.what == "all-reduce of 1.0 MiB left 2 wrong values"


def test_data_recommends_the_fewest_workers_that_are_enough() -> None:
    rows = []
    for workers, seconds in ((0, 0.1), (2, 0.02), (4, 0.0199)):
        figures = {"samples": 10.0, "start_s": 0.1}
        rows.append(Row(labels={"workers": workers}, seconds=(seconds,), figures=figures))
    report = data.summarize(rows)
    assert report.conclusion.startswith("2 workers per rank read 500 samples/s, 5 times as many")
    assert "data.workers: 2" in report.advice


def test_a_report_is_saved_as_page_chart_and_record(tmp_path: Path) -> None:
    rows = [product("cpu", "float32", 128, 1e-3)]
    report = matmul.summarize(rows)
    files = show.save(report, record(rows), tmp_path / "out")
    assert files == ["report.html", "record.json", "matmul.svg"]
    assert result.read_record(tmp_path / "out") == record(rows)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "<svg" in page
    lines = show.screen(report).splitlines()
    assert lines[0] == report.conclusion
    assert any(line.startswith("What to do: ") for line in lines)
    (tmp_path / "file").touch()
    with pytest.raises(Impossible, match="cannot write to"):
        show.save(report, record(rows), tmp_path / "file")


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1}', "[1, 2"])
def test_other_files_are_no_records(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(Impossible, match="not a record of muster bench"):
        result.read_record(tmp_path)


def test_a_newer_record_is_refused(tmp_path: Path) -> None:
    newer = replace(record([]), version=2)
    (tmp_path / "record.json").write_bytes(result.encode_record(newer))
    with pytest.raises(Impossible, match="cannot read"):
        result.read_record(tmp_path)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((1.10, 1.11, 1.12), "slower"),
        ((0.90, 0.91, 0.92), "faster"),
        ((1.001, 1.011, 1.021), "within noise"),  # less than 2 %
        ((0.9, 1.10, 1.3), "within noise"),  # the quartiles overlap
    ],
)
def test_a_difference_counts_if_it_exceeds_the_spread(
    after: tuple[float, ...], verdict: str
) -> None:
    before = replace(product("cpu", "float32", 128, 1.0), seconds=(0.99, 1.0, 1.01))
    changes = compare.compare_records(record([before]), record([replace(before, seconds=after)]))
    assert [change.verdict for change in changes] == [verdict]


def test_compare_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [product("cpu", "float32", 128, 1.0), product("cpu", "float32", 256, 2.0)]
    slower = [rows[0], product("cpu", "float32", 256, 2.5)]
    for name, some, cores in (("before", rows, "8"), ("after", slower, "4")):
        show.save(matmul.summarize(some), record(some, cores=cores), tmp_path / name)
    words = ["bench", "compare", str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(words) == ExitCode.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 slower, 1 within noise of 2 cases; the largest change is +25.0%")
    assert lines[1] == "  different cores: 8 and 4"
    assert lines[-1].split()[-2:] == ["1.250", "slower"]
    assert main([*words[:3], words[2]]) == ExitCode.GOOD


def test_records_of_different_benches_are_refused() -> None:
    with pytest.raises(Impossible, match="cannot compare"):
        compare.compare_records(record([]), record([], bench="attention"))
    with pytest.raises(Impossible, match="cannot compare"):
        compare.compare_records(record([]), record([]))
