"""A trace is read piece by piece, and comes out as it is, whatever its size, form or damage."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from made_up_profiles import event, write_trace
from torchmuster.bench.profile import trace_events
from torchmuster.bench.profile.trace_events import TraceFile
from torchmuster.errors import Impossible


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "_PIECE_BYTES", 300)


def names(trace: TraceFile) -> list[str]:
    return [one.name for batch in trace.batches() for one in batch]


NASTY = ["plain", 'a "quoted" }, {', "},{", '{"ph": "X"}', "\\", "ünï", "]", "}]"]


NESTED: list[dict[str, object]] = [{}, {"a": [{"x": "},{"}, {"ph": 1}]}]


@given(st.lists(st.tuples(st.sampled_from(NASTY), st.sampled_from(NESTED))))
@settings(max_examples=60, deadline=None)
def test_every_event_comes_out_once(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[str, dict[str, object]]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    events = [event(name, at, 1.0, args=args) for at, (name, args) in enumerate(said)]
    trace = TraceFile(write_trace(path, events, distributedInfo={"rank": 3}))
    assert names(trace) == [name for name, _ in said]
    assert (trace.truncated, trace.unreadable) == (False, 0)
    assert trace.header["distributedInfo"] == {"rank": 3}


def test_packed_and_bare_traces_are_read(tmp_path: Path) -> None:
    events = [event(f"n{at}", at, 1.0) for at in range(50)]
    wanted = [one["name"] for one in events]
    assert names(TraceFile(write_trace(tmp_path / "t.json.gz", events))) == wanted
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(events))
    assert names(TraceFile(bare)) == wanted
    empty = write_trace(tmp_path / "empty.json", [])
    assert names(TraceFile(empty)) == []


def test_what_follows_the_events_is_not_taken_for_events(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps({"traceEvents": [event("one", 0, 1.0)], "after": [{"name": "x"}, {"name": "y"}]})
    )
    assert names(TraceFile(path)) == ["one"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_ends_too_early_gives_what_is_there(tmp_path: Path, packed: bool) -> None:
    events = [event(f"n{at}", at, 1.0) for at in range(50)]
    path = write_trace(tmp_path / "t.json", events)
    cut = path.read_bytes()[:-700]
    path.write_bytes(gzip.compress(cut)[:-12] if packed else cut)
    trace = TraceFile(path)
    assert names(trace)[:30] == [f"n{at}" for at in range(30)]
    assert trace.truncated


def test_damaged_events_are_passed_over_and_counted(tmp_path: Path) -> None:
    events = [event(f"n{at}", at, 1.0) for at in range(200)]
    path = write_trace(tmp_path / "t.json", events)
    path.write_text(path.read_text().replace('"name": "n40"', '"name": n40"'))
    trace = TraceFile(path)
    assert set(names(trace)) == {f"n{at}" for at in range(200) if at != 40}
    assert trace.unreadable == 1


@pytest.mark.parametrize("inner", [b"[" * 5000 + b"]" * 5000, b'"\xff"'], ids=["deep", "not UTF-8"])
def test_a_hostile_header_or_event_costs_nothing_else(tmp_path: Path, inner: bytes) -> None:
    path = tmp_path / "t.json"
    good = b'{"ph":"X","cat":"cpu_op","name":"good","ts":1,"dur":1,"args":{}}'
    bad = b'{"ph":"X","cat":"cpu_op","name":"bad","ts":1,"dur":1,"args":{"a":%s}}' % inner
    events = b",\n".join([good, bad, *[good] * 100])
    path.write_bytes(b'{"a":%s,"traceEvents":[\n%s]}' % (inner, events))
    assert names(TraceFile(path)).count("good") == 101


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"rows": []}')
    with pytest.raises(Impossible, match=r"notes\.json") as refused:
        names(TraceFile(path))
    assert refused.value == snapshot
    assert "export_chrome_trace" in refused.value.fix


def test_batches_that_hold_nothing_wanted_are_skipped(tmp_path: Path) -> None:
    events = [event(f"n{at}", at, 1.0) for at in range(200)]
    events[150]["name"] = "muster:step#4"
    trace = TraceFile(write_trace(tmp_path / "t.json", events))
    seen = [one.name for batch in trace.batches(holding=b"muster:step#") for one in batch]
    assert "muster:step#4" in seen
    assert len(seen) < 20
