"""``muster bench``: what is kept and shown; ``compare`` says what changed and ends accordingly."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_records import elsewhere, keep, made_up
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.bench import record
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.cli import bench
from torchmuster.cli.main import main
from torchmuster.decision import Decision
from torchmuster.errors import ExitCode, Impossible
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Bar, bar_chart

EVIL = "<script>alert(1)</script>"


def report(status: Status = Status.OK) -> Report:
    return Report(
        bench="matmul",
        question="how fast are products here?",
        findings=(Finding(name="speed", status=status, what=f"as fast as it gets {EVIL}"),),
        choices=(Decision(value="bf16", reason="1.9 times as fast"),),
        tables=(
            Table(
                title="products",
                head=("size", "time"),
                rows=tuple((str(size), f"{size} ms") for size in range(40)),
                note="of squares",
            ),
        ),
        pictures=(Picture(title="Time by size", svg=bar_chart("t", "s", [Bar(name="a", value=1.0)]), caption="c"),),
        record=made_up({"product": [0.1, 0.2, 0.3]}),
        took_s=12.0,
    )  # fmt: skip


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"out": None, "json": False, "device": None, **given})


def test_a_report_is_shown_and_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench.finish(report(), options()) == ExitCode.GOOD
    (folder,) = (tmp_path / "bench").iterdir()
    assert folder.name.startswith("matmul-20")
    assert {one.name for one in folder.iterdir()} == {
        "record.json",
        "report.html",
        "time-by-size.svg",
    }
    assert record.read_record(folder / "record.json") == report().record
    shown = capsys.readouterr().out
    assert f"bench/{folder.name}" in shown
    assert shown.replace(folder.name, "FOLDER") == snapshot


def test_a_page_has_everything_and_nothing_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.finish(report(), options(out=tmp_path / "here"))
    page = (tmp_path / "here" / "report.html").read_text()
    assert "39 ms" in page
    assert "± 50.0%" in page  # the range of three samples
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_a_busy_machine_is_told_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    busy = replace(report(), record=elsewhere(report().record, busy_before_cores=6.0))
    assert bench.finish(busy, options(out=tmp_path / "here")) == ExitCode.GOOD
    (warning,) = re.findall("^warning  (.*)", capsys.readouterr().out, re.MULTILINE)
    assert warning == snapshot
    assert warning in (tmp_path / "here" / "report.html").read_text()


def test_a_second_bench_in_the_same_second_gets_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        bench.finish(report(), options())
    assert len(list((tmp_path / "bench").iterdir())) == 3


def test_json_has_the_record_and_the_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = bench.finish(report(Status.FAILURE), options(out=tmp_path / "here", json=True))
    assert code == ExitCode.FAILED
    document = json.loads(capsys.readouterr().out)
    assert msgspec.convert(document["record"], record.BenchRecord) == report().record
    assert document["findings"][0]["status"] == "failure"
    assert document["kept"] == str(tmp_path / "here")


def test_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Impossible, match="cannot write to"):
        bench.finish(report(), options(out=tmp_path / "file"))


def test_where_to_measure_is_said_with_its_reason(
    machine: Callable[[Scenario], Path], snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.no_gpus())
    assert bench.device_of(options()) == Decision(value="cpu", reason="no GPU is visible here")
    with pytest.raises(Impossible) as refused:
        bench.device_of(options(device="gpu"))
    assert refused.value == snapshot
    machine(scenarios.eight_a100_idle())
    assert bench.device_of(options()) == Decision(value="gpu", reason="visible: GPUs 0-7")
    assert bench.device_of(options(device="cpu")).reason == "set by --device"


# ---- compare


def sides(folder: Path, *, slower: float = 0.0, in_turns: bool = True) -> tuple[str, str]:
    """Eight records each; the second side's ``step`` is slower."""
    for name, factor, late in (("before", 1.0, 0), ("after", 1.0 + slower, 1)):
        keep(
            folder / name,
            [
                made_up(
                    {"step": [factor * (1 + one / 1000)], "other": [1 + one / 1000]},
                    minute=2 * one + late if in_turns else one + 20 * late,
                )
                for one in range(8)
            ],
        )
    return str(folder / "before"), str(folder / "after")


def test_a_slow_down_is_told_and_ends_in_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    assert main(["bench", "compare", *sides(tmp_path, slower=0.03)]) == ExitCode.FAILED
    assert capsys.readouterr().out == snapshot


def test_nothing_changed_and_what_would_have_been_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    assert main(["bench", "compare", *sides(tmp_path)]) == ExitCode.GOOD
    assert capsys.readouterr().out == snapshot


def test_sides_that_were_not_measured_in_turns_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    main(["bench", "compare", *sides(tmp_path, in_turns=False)])
    shown = capsys.readouterr().out
    assert "alternately" in shown
    assert shown == snapshot


def test_one_record_each_says_what_it_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    samples = [1 + one / 1000 for one in range(15)]
    before = keep(tmp_path / "a", [made_up({"step": samples})]) / "0"
    after = keep(tmp_path / "b", [made_up({"step": [one * 1.05 for one in samples]})]) / "0"
    assert main(["bench", "compare", str(before), str(after / "record.json")]) == ExitCode.GOOD
    assert capsys.readouterr().out == snapshot


def test_what_else_differs_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    one = made_up({"step": [1.0]})
    other = replace(elsewhere(one, torch="2.12.0", busy_before_cores=5.0, busy_after_cores=5.0), settings={"sizes": [256]})  # fmt: skip
    keep(tmp_path / "a", [one])
    keep(tmp_path / "b", [other])
    main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    shown = capsys.readouterr().out
    assert ["2.13.0" in line for line in shown.splitlines()][:2] == [False, True]
    assert shown == snapshot


def test_programs_get_the_comparison_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "compare.html"
    words = [*sides(tmp_path, slower=0.03), "--json", "--html", str(page)]
    assert main(["bench", "compare", *words]) == ExitCode.FAILED
    document = json.loads(capsys.readouterr().out)
    assert document["records"] == [8, 8]
    assert [one["verdict"] for one in document["changes"]] == ["worse", "within noise"]
    assert 'class="failure">worse</b>' in page.read_text()


def test_a_folder_without_records_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    before, _ = sides(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["bench", "compare", before, str(tmp_path / "empty")]) == ExitCode.IMPOSSIBLE
    assert capsys.readouterr().err == snapshot
