"""Traces in processes of their own: asked for once, kept, and gone again; what dies says why."""

import queue
import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import Peak, TraceRecord, TraceRequest
from torchmuster.plan.tracing import cache as cache_module
from torchmuster.plan.tracing import tracer as tracing
from torchmuster.plan.tracing.cache import TraceCache, contents_of
from torchmuster.plan.tracing.tracer import Tracer, TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout

# Answers as the probe does, with a peak of as many bytes as blocks were asked for; 13 blocks end it, 14 are
# refused, 15 wait until they were heard of.
STAND_IN = """
import json, os, sys, time
print("a model may print", file=sys.stderr)
def log(blocks):
    os.makedirs(sys.argv[1], exist_ok=True)
    path = os.path.join(sys.argv[1], f"{blocks}-{os.getpid()}.jsonl")
    with open(path, "w") as file, open("mine.py") as code:
        file.write(f"a log of {code.read()}")
    return path
with open("started", "a") as file:
    file.write("x")
for line in sys.stdin:
    request = json.loads(line)
    blocks = request["blocks"]
    if blocks == 13:
        for number in range(20):
            print(f"USDT:2026-11-15 20:00:00 1:1 init.cpp:{number}] profiler_start", file=sys.stderr)
        sys.exit("no room: token=hf_abcdefghijklmnopqrstuvwxyz012345")
    with open("asked", "a") as file:
        file.write(f"{blocks} ")
    while blocks == 15 and not os.path.exists("heard"):
        time.sleep(0.01)
    if blocks == 14:
        answer = {"refused": {"what": "cannot", "why": "because", "fix": "do"}}
    else:
        peak = {"phase": "forward", "micro_batch": 0, "block": None, "after_block": None,
                "peak_bytes": blocks, "by_category": {}, "operation": "", "module": ""}
        answer = {"record": {"request": request, "torch": "2", "blocks_traced": blocks, "blocks": blocks,
            "blocks_alike": True, "parameters": [], "parameter_count": 1, "trained_count": 1,
            "samples_per_micro_batch": 1, "tokens_per_sample": None, "states": {},
            "first_step_peak_bytes": 1, "peaks": [peak], "timeline": [], "host_bytes": 0, "log": log(blocks)}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model's code, and let what is there answer instead of the probe."""
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


def peaks(found: list[TraceRecord | TraceRefused]) -> list[int]:
    return [one.peak_bytes for one in found if isinstance(one, TraceRecord)]


def asked(folder: Path) -> list[str]:
    return sorted((folder / "asked").read_text().split())


def test_answers_come_in_the_order_of_requests_and_equal_ones_are_asked_once(folder: Path) -> None:
    requests = [a_request(folder, blocks) for blocks in (3, 4, 5, 3)]
    with Tracer(cache=None, workers=2) as tracer:
        assert peaks(tracer.records(requests)) == [3, 4, 5, 3]
        assert peaks(tracer.records([a_request(folder, 6)])) == [6]
    assert asked(folder) == ["3", "4", "5", "6"]
    assert len((folder / "started").read_text()) <= 2, "a process answers more than once"


def test_a_second_plan_asks_nobody(folder: Path) -> None:
    requests = [a_request(folder, blocks) for blocks in (3, 4)]
    for _ in range(2):
        with Tracer(cache=folder / "cache") as tracer:
            assert peaks(tracer.records(requests)) == [3, 4]
    assert asked(folder) == ["3", "4"]


def test_changed_code_is_traced_again(folder: Path) -> None:
    request = a_request(folder, 3)
    with Tracer(cache=folder / "cache") as tracer:
        tracer.records([request])
    (folder / "mine.py").write_text("def make(): return 1")
    with Tracer(cache=folder / "cache") as tracer:
        tracer.records([request])
    assert asked(folder) == ["3", "3"]


def test_a_damaged_entry_is_as_if_it_were_not_there(folder: Path) -> None:
    request = a_request(folder, 3)
    with Tracer(cache=folder / "cache") as tracer:
        tracer.records([request])
    (entry,) = (folder / "cache").rglob("*.json")
    for damage in (b"", entry.read_bytes()[:-9], b"\xff\xfe", b'{"request": 1}'):
        entry.write_bytes(damage)
        assert TraceCache(folder / "cache").get(request) is None


def test_a_record_whose_log_is_gone_is_traced_again_where_the_log_is_wanted(folder: Path) -> None:
    plain = a_request(folder, 3)
    logged = replace(plain, keep_log=True)
    with Tracer(cache=folder / "cache") as tracer:
        (record,) = tracer.records([logged])
    assert isinstance(record, TraceRecord)
    cache = TraceCache(folder / "cache")
    assert cache.get(logged) == record
    Path(str(record.log)).unlink()
    assert cache.get(logged) is None
    assert cache.get(plain) == replace(record, request=plain, log=None)


def test_a_model_that_changes_back_has_its_own_log_again(folder: Path) -> None:
    request = replace(a_request(folder, 3), keep_log=True)
    for code in ("one", "two", "one"):
        (folder / "mine.py").write_text(code)
        with Tracer(cache=folder / "cache") as tracer:
            (record,) = tracer.records([request])
        assert isinstance(record, TraceRecord)
        assert Path(str(record.log)).read_text() == f"a log of {code}"
    assert asked(folder) == ["3", "3"]
    assert len(list((folder / "cache").rglob("*.jsonl"))) == 2, (
        "logs have the names of records only"
    )


def test_what_is_kept_is_bounded_and_the_oldest_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = folder / "cache" / "calibration.json"
    beside.parent.mkdir()
    beside.write_text("{}")
    cache = TraceCache(folder / "cache")
    requests = [a_request(folder, blocks) for blocks in (3, 4, 5)]
    for request in requests[:2]:
        with Tracer(cache=folder / "cache") as tracer:
            tracer.records([request])
    of_two = sum(path.stat().st_size for path in cache.folder.iterdir())
    monkeypatch.setattr(cache_module, "MOST_BYTES", of_two)
    with Tracer(cache=folder / "cache") as tracer:
        tracer.records(requests[2:])
    assert [cache.get(one) is not None for one in requests] == [False, True, True]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= of_two
    assert beside.exists()


@pytest.mark.parametrize("kept", [True, False])
def test_a_trace_serves_with_its_log_and_without(folder: Path, kept: bool) -> None:
    plain = a_request(folder, 3)
    logged = replace(plain, keep_log=True)
    with Tracer(cache=folder / "cache" if kept else None) as tracer:
        first, second = tracer.records([plain, logged])
        (again,) = tracer.records([logged])
        assert isinstance(first, TraceRecord)
        assert isinstance(second, TraceRecord)
        assert first == replace(second, request=plain, log=None)
        assert second.request == logged
        assert Path(str(second.log)).read_text() == "a log of def make(): ..."
        assert again == second
    assert asked(folder) == ["3"]
    assert Path(str(second.log)).exists() == kept, "without a cache nothing is left"


def test_what_was_traced_by_other_code_is_traced_again() -> None:
    from torchmuster.plan.tracing.cache import versions

    for file in ("plan/probes/trace.py", "plan/memory/allocator.py", "train/step.py"):
        assert f"torchmuster/{file}" in versions().decode()


def test_a_process_that_dies_shows_its_last_words_and_others_go_on(
    folder: Path, snapshot: SnapshotAssertion
) -> None:
    with Tracer(cache=folder / "cache", workers=1) as tracer:
        died, answered = tracer.records([a_request(folder, 13), a_request(folder, 3)])
    assert isinstance(died, TraceRefused)
    assert died.what == snapshot
    assert "exit code 1\na model may print\nno room: token=" in died.why
    assert "abcdefghijklmnop" not in died.why
    assert peaks([answered]) == [3]


def test_a_refusal_is_handed_on_and_asked_again_next_time(folder: Path) -> None:
    for _ in range(2):
        with Tracer(cache=folder / "cache") as tracer:
            found = tracer.records([a_request(folder, 14)])
        assert found == [TraceRefused(what="cannot", why="because", fix="do")]
    assert asked(folder) == ["14", "14"]


def test_a_folder_that_is_not_there_is_refused(folder: Path, snapshot: SnapshotAssertion) -> None:
    with Tracer(cache=None) as tracer:
        (found,) = tracer.records([a_request(folder / "nowhere", 3)])
    assert isinstance(found, TraceRefused)
    assert str(folder / "nowhere") in found.what
    assert found.what == snapshot


def test_long_traces_are_heard_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(tracing, "_SAY_EVERY_S", 0.001)
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        (folder / "heard").touch()  # what is traced waits for it

    with Tracer(cache=None, say=hear) as tracer:
        tracer.records([a_request(folder, 15)])
    assert re.sub(r"\d+ s\b", "TIME", said[0]) == snapshot


def test_answers_that_keep_coming_do_not_hide_the_progress(folder: Path) -> None:
    """A trace that ends after nine seconds does not put the next line off by another ten."""
    done: queue.Queue[tuple[TraceRequest, tracing.Found]] = queue.Queue()
    said: list[str] = []

    def answer_once_heard(text: str) -> None:
        said.append(text)
        done.put((a_request(folder, 3), TraceRefused(what="no")))

    tracer = Tracer(cache=None, say=answer_once_heard)
    tracer._said -= tracing._SAY_EVERY_S  # no progress was printed for so long
    assert len(tracer._collected(1, done)) == 1
    assert len(said) == 1


def test_what_a_model_is_made_of_decides(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "parts.py").write_text("")
    by_config = Work(model_name_or_path="model", folder=str(tmp_path))
    by_code = Work(build="package.parts:make", folder=str(tmp_path))
    before = contents_of(by_config), contents_of(by_code)
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "package" / "more.py").write_text("")
    assert contents_of(by_config) != before[0]
    assert contents_of(by_code) != before[1]
    assert contents_of(by_code) == contents_of(by_code)


def test_planning_needs_no_torch() -> None:
    import subprocess

    code = "import sys, torchmuster.plan.tracing.tracer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_record_survives_being_written(folder: Path) -> None:
    with Tracer(cache=None) as tracer:
        (record,) = tracer.records([a_request(folder, 3)])
    assert isinstance(record, TraceRecord)
    assert isinstance(record.peaks[0], Peak)
    assert msgspec.json.decode(msgspec.json.encode(record), type=TraceRecord) == record


def test_a_torch_below_the_floor_is_refused_and_nothing_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(tracing, "torch_version", lambda: "2.11.0+cpu")
    with Tracer(cache=None) as tracer:
        (found,) = tracer.records([a_request(folder, 3)])
    assert found == snapshot
    assert not (folder / "started").exists()


def test_progress_has_a_total_and_an_estimate() -> None:
    assert tracing.progress_text(0, 2, 180.0).startswith("tracing: 0 of 2 done after 180 s")
    assert tracing.progress_text(3, 2, 30.0).endswith(
        "3 of 5 done after 30 s; the rest takes about 20 s"
    )
