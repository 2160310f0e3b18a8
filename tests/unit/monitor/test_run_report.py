"""The report that a run leaves: what was asked, what is true, what to do; whatever the run was."""

import json
import os
import re
from html import unescape
from pathlib import Path

import pytest

from made_up_runs import (
    NOW,
    a_run,
    add_event,
    add_lines,
    add_ranks,
    lifelike_lines,
    set_state,
    write_lines,
)
from patience import GIVE_UP_S
from torchmuster.finding import Finding, Status
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.monitor.views import run_report
from torchmuster.runfolder import RunFolder
from unit.monitor.test_page_parts import check_markup

SPEC = JobSpec(
    name="llm",
    command=("torchmuster.worker", "--set", "a=b"),
    typed=("train", "--config", "llm.yaml"),
    folder="/",
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = a_run(tmp_path, phase="finished", headline="finished")
    run_state.write_job(run, SPEC)
    return run


def _page(run: RunFolder) -> str:
    page = run_report.run_report(run)
    check_markup(page)
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page, (
        "nothing may run or be fetched"
    )
    assert "prefers-color-scheme" in page
    return page


def _answer(page: str) -> dict[str, str]:
    found = re.findall(r"<dt>(command|result|to do)</dt><dd>(.*?)</dd>", page, re.DOTALL)
    return {name: unescape(words) for name, words in found}


def test_a_run_that_finished(run: RunFolder) -> None:
    add_lines(run)
    add_ranks(run, 2)
    add_event(run, "started", NOW - 90, attempt=0, ranks=2)
    run.config.write_text("train:\n  steps: 100\n")
    (run.metrics / "evaluations.jsonl").write_text('{"step": 90, "epoch": 0, "accuracy": 0.875}\n')
    page = _page(run)
    assert '<h1>llm: <b class="ok">finished</b></h1>' in page
    told = _answer(page)
    assert told["command"] == "muster train --config llm.yaml"
    assert "100 steps, loss" in told["result"]
    assert told["to do"] == "nothing"
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg"') == 3
    assert "<td>1</td><td>a</td>" in page
    assert "accuracy" in page
    assert "steps: 100" in page


def test_where_the_time_of_all_steps_went(run: RunFolder) -> None:
    run.events.unlink()
    set_state(run, "finished", lasted_s=410.0)  # of which the last 10 s were after its end
    add_lines(run, 10, step_s=2.0, compute_share=0.5, communication_share=0.2, data_share=0.3,
              checkpoint_share=0.0)  # fmt: skip
    page = _page(run)
    # 100 steps of 2 s in 400 s
    for words in (
        "compute 25% (1 min)",
        "communication 10% (40 s)",
        "data 15% (1 min)",
        "other 50% (3 min)",
    ):
        assert words in page


def test_a_run_that_failed(run: RunFolder) -> None:
    write_lines(run, lifelike_lines(60, bad_from=50))
    failed = Finding(
        name="rank-failed",
        status=Status.FAILURE,
        what="rank 1 on a failed: ValueError: bad",
        why="a batch is empty",
        fix="leave it out",
        evidence="Traceback …",
    )
    run.events.unlink()
    set_state(run, "failed", failed.what, lasted_s=NOW - 1.0, finding=failed.as_json())
    page = _page(run)
    assert 'llm: <b class="failure">failed</b>' in page
    told = _answer(page)
    assert told["result"].startswith("rank 1 on a failed:")
    assert told["to do"] == "leave it out"
    assert "a batch is empty" in page


def test_a_run_whose_launcher_died_lasted_until_it_was_last_heard_of(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run_state.write_job(run, SPEC)
    job = json.loads(run.job.read_text())
    job["launcher"] |= {"pid": 2**22 + 1, "start_s": 1.0}
    run.job.write_text(json.dumps(job))
    os.utime(run.job, (NOW + 500, NOW + 500))
    page = _page(run)
    assert 'llm: <b class="failure">died</b>' in page
    assert "duration 10 min" in _answer(page)["result"]


def test_secrets_in_settings_are_hidden(run: RunFolder) -> None:
    run.config.write_text("hub_token: hf_abcdefghijklmnopqrstuvwx\n")
    assert "hf_abc" not in _page(run)


def test_a_long_run_makes_a_small_page(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torchmuster.monitor.collecting.growing_file._AT_A_TIME_BYTES", 100_000
    )  # so that it takes several looks
    monkeypatch.setattr(run_report, "_READ_WITHIN_S", GIVE_UP_S)
    write_lines(run, lifelike_lines(5_000))
    add_ranks(run, 64)
    page = _page(run)
    assert "250,000 steps" in _answer(page)["result"]
    assert len(page) < 250_000
    assert "too long" not in page
    monkeypatch.setattr(run_report, "_READ_WITHIN_S", -1.0)
    assert "too long" in _page(run)
