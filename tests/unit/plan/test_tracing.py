"""Traces in a process of their own: asked for once, cached, and ended; what exits says why."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.tracing import cache as cache_module
from torchmuster.plan.tracing import tracer as tracing
from torchmuster.plan.tracing.cache import TraceCache, contents_of, versions
from torchmuster.plan.tracing.tracer import Traced, Tracer, TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout

# Answers as the probe does, with a peak of as many bytes as blocks were requested; 13 blocks end it,
# 14 are refused, 15 wait until they were heard of, 16 give an answer that cannot be read.
STAND_IN = """
import json, os, sys, time
print("a model may print", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    blocks = request["blocks"]
    if blocks == 13:
        print("USDT:2026-11-15 20:00:00 1:1 init.cpp:1] profiler_start", file=sys.stderr)
        sys.exit("no room: token=hf_abcdefghijklmnopqrstuvwxyz012345")
    with open("asked", "a") as file:
        file.write(f"{blocks} ")
    while blocks == 15 and not os.path.exists("heard"):
        time.sleep(0.01)
    answer = {"refused": {"what": "cannot", "why": "because", "fix": "do"}}
    if blocks != 14:
        peak = {"phase": "forward", "micro_batch": 0, "block": None,
                "peak_bytes": blocks, "by_category": {}}
        answer = {"record": {"request": request, "blocks_traced": blocks, "blocks": blocks,
            "parameters": [], "parameter_count": 1, "trained_count": 1,
            "input_bytes": 0, "host_bytes": 0, "peaks": [peak], "costs": {}}}
    print("x" if blocks == 16 else json.dumps(answer), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model's code, whose stand-in answers instead of the probe."""
    (tmp_path / "stand_in_for_trace.py").write_text(STAND_IN)
    (tmp_path / "mine.py").write_text("def make(): ...")
    monkeypatch.setattr(tracing, "PROGRAM", "stand_in_for_trace")
    return tmp_path


def a_request(folder: Path, blocks: int) -> TraceRequest:
    return TraceRequest(
        work=Work(build="mine:make", sequence_length=8, folder=str(folder)),
        candidate=Candidate(strategy="single", layout=ShardLayout(copies=1, shards=1)),
        blocks=blocks,
    )


def traced(folder: Path, *blocks: int, cached: bool = False) -> list[Traced]:
    with Tracer(cache=folder / "cache" if cached else None) as tracer:
        return tracer.records([a_request(folder, number) for number in blocks])


def peaks(found: list[Traced]) -> list[int]:
    return [one.peak_bytes for one in found if isinstance(one, TraceRecord)]


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().split()


def test_answers_come_in_the_order_of_requests_and_equal_ones_are_traced_once(folder: Path) -> None:
    assert peaks(traced(folder, 3, 4, 5, 3)) == [3, 4, 5, 3]
    assert asked(folder) == ["3", "4", "5"]


def test_a_second_plan_traces_nothing_until_the_code_changes(folder: Path) -> None:
    for _ in range(2):
        assert peaks(traced(folder, 3, 4, cached=True)) == [3, 4]
    assert asked(folder) == ["3", "4"]
    (folder / "mine.py").write_text("def make(): return 1")
    traced(folder, 3, cached=True)
    assert asked(folder) == ["3", "4", "3"]


def test_a_damaged_entry_is_ignored(folder: Path) -> None:
    traced(folder, 3, cached=True)
    (entry,) = (folder / "cache").rglob("*.json")
    for damage in (b"", entry.read_bytes()[:-9], b"\xff\xfe", b'{"request": 1}'):
        entry.write_bytes(damage)
        assert TraceCache(folder / "cache").get(a_request(folder, 3)) is None


def test_the_cache_is_bounded_and_the_oldest_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TraceCache(folder / "cache")
    traced(folder, 3, cached=True)
    traced(folder, 4, cached=True)
    size = sum(path.stat().st_size for path in cache.folder.iterdir())
    monkeypatch.setattr(cache_module, "MOST_BYTES", size)
    traced(folder, 5, cached=True)
    found = [cache.get(a_request(folder, blocks)) is not None for blocks in (3, 4, 5)]
    assert found == [False, True, True]


def test_a_process_that_exits_shows_its_last_lines_and_the_next_trace_goes_on(folder: Path) -> None:
    ended, answered = traced(folder, 13, 3)
    assert isinstance(ended, TraceRefused)
    assert "exited before it had an answer" in ended.what
    assert "exit code 1\na model may print\nno room: token=" in ended.why
    assert "abcdefghijklmnop" not in ended.why
    assert peaks([answered]) == [3]


def test_an_answer_that_cannot_be_read_ends_the_plan(folder: Path) -> None:
    with pytest.raises(Exception, match="JSON"):
        traced(folder, 16)


def test_a_refusal_is_not_cached(folder: Path) -> None:
    for _ in range(2):
        assert traced(folder, 14, cached=True) == [
            TraceRefused(what="cannot", why="because", fix="do")
        ]
    assert asked(folder) == ["14", "14"]


def test_long_traces_report_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_SAY_EVERY_S", 0.001)
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        (folder / "heard").touch()  # the trace waits for it

    with Tracer(cache=None, say=hear) as tracer:
        tracer.records([a_request(folder, 15)])
    assert said[0].startswith("tracing 1 of 1: ")


def test_the_files_of_a_training_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub" / "models--owner--name"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in ("model/config.json", "package/parts.py", "steps.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    folder = str(tmp_path)
    for work, changed in (
        (Work(model_name_or_path="model", folder=folder), tmp_path / "model" / "config.json"),
        (Work(build="package.parts:make", folder=folder), tmp_path / "package" / "more.py"),
        (Work(build="a:b", optimizer="steps:make", folder=folder), tmp_path / "steps.py"),
        (Work(model_name_or_path="owner/name", folder=folder), hub / "refs" / "main"),
        (
            Work(model_name_or_path="owner/name", folder=folder),
            hub / "snapshots" / "1" / "config.json",
        ),
    ):
        before = contents_of(work)
        assert contents_of(work) == before
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text("changed")
        assert contents_of(work) != before, work


def test_the_tracing_code_decides() -> None:
    for file in ("plan/probes/trace.py", "train/step.py"):
        assert f"torchmuster/{file}" in versions().decode()


def test_planning_needs_no_torch() -> None:
    code = "import sys, torchmuster.plan.search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_torch_below_the_floor_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "torch_version", lambda: "2.11.0+cpu")
    (found,) = traced(folder, 3)
    assert isinstance(found, TraceRefused)
    assert "torch 2.11.0+cpu is older than" in found.what
    assert not (folder / "asked").exists()
