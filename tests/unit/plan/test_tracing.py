"""Traces in a process of their own: each once; what exits says why."""

import subprocess
import sys
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from made_up_plans import EXITS, REFUSED, SLOW, WORK, answer_with_made_up_records, fsdp
from torchmuster.errors import Impossible
from torchmuster.plan import tracer as tracing
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.tracer import Tracer


@pytest.fixture(autouse=True, scope="module")
def tracker_of_python() -> None:
    """Start the process that multiprocessing keeps until Python's exit, which is no leak."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "answer_requests", answer_with_made_up_records)


def request_of(folder: Path, blocks: int) -> TraceRequest:
    work = replace(WORK, folder=str(folder))
    return TraceRequest(work=work, candidate=fsdp(), blocks=blocks)


def test_equal_requests_are_traced_once(tmp_path: Path) -> None:
    with Tracer() as tracer:
        records = [tracer.trace(request_of(tmp_path, blocks)) for blocks in (3, 4, 3)]
    assert [record.blocks_traced for record in records] == [3, 4, 3]
    assert (tmp_path / "asked").read_text() == "3 4 "


def test_a_process_that_exits_shows_its_last_lines_and_the_next_trace_goes_on(
    tmp_path: Path,
) -> None:
    with Tracer() as tracer:
        with pytest.raises(Impossible, match="exited before it had an answer") as ended:
            tracer.trace(request_of(tmp_path, EXITS))
        assert "exit code 3\nno room: token=" in ended.value.why
        assert "abcdefghijklmnop" not in ended.value.why
        assert tracer.trace(request_of(tmp_path, 3)).blocks_traced == 3


def test_a_refusal_is_raised_as_it_is(tmp_path: Path) -> None:
    with Tracer() as tracer, pytest.raises(Impossible) as refused:
        tracer.trace(request_of(tmp_path, REFUSED))
    assert (refused.value.what, refused.value.why, refused.value.fix) == ("cannot", "because", "do")


def test_long_traces_report_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SAY_EVERY_S", 0.1)
    progress: list[str] = []
    with Tracer(say=progress.append) as tracer:
        tracer.trace(request_of(tmp_path, SLOW))
    assert progress[0].startswith("tracing: ")


def test_planning_needs_no_torch() -> None:
    code = "import sys, torchmuster.plan.search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_torch_below_the_floor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "torch_version", lambda: "2.11.0+cpu")
    with Tracer() as tracer, pytest.raises(Impossible, match=r"torch 2\.11\.0\+cpu is older"):
        tracer.trace(request_of(tmp_path, 3))
