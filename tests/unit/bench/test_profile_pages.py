"""A profile on the screen and as a page: the verdict first, nothing from outside as markup."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_profiles import HEALTHY, event, mark, rank, ranks, step, write_trace
from torchmuster.bench.profile import analysis
from torchmuster.bench.profile.advice import advise
from torchmuster.bench.profile.analysis import Analysis, analyse_facts, analyse_profile
from torchmuster.bench.profile.changes import ChangeTrial, TriedChange
from torchmuster.bench.profile.recording import TraceKept, write_facts
from torchmuster.bench.report.profile import (
    memory_picture,
    profile_page,
    profile_screen,
    shares_picture,
    step_picture,
)

EVENTS = [
    mark("muster:step#20", 0, 67_000),
    mark("muster:forward", 1_000, 20_000),
    event("aten::<b>mm</b>", 1_000, 20_000),
    mark("muster:backward", 21_000, 42_000),
    event("autograd::engine::evaluate_function: MmBackward", 21_000, 38_000),
    mark("gloo:all_reduce", 50_000, 13_000, thread=2),
    {
        "ph": "i",
        "name": "[memory]",
        "ts": 30_000.0,
        "pid": 7,
        "tid": 1,
        "args": {"Total Allocated": 2**20, "Device Type": 0},
    },
]


def profile(folder: Path) -> Analysis:
    """Return two ranks that wait for their data, with traces."""
    starved = {"data_s": 0.040}
    for facts in ranks(starved, starved):
        name = f"rank-{facts.rank}.trace.json.gz"
        write_trace(folder / name, EVENTS)
        kept = TraceKept(file=name, size_bytes=1, first_step=20, last_step=20)
        more = step(13, profiled=True, **starved)
        write_facts(folder, dataclasses.replace(facts, trace=kept, steps=(*facts.steps, more)))
    return analyse_profile(folder)


def test_the_screen_says_what_where_and_what_to_do(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    found = profile(tmp_path)
    proof = ChangeTrial(
        change=TriedChange(kind="workers", value=2), before_s=(0.106,), after_s=(0.070,)
    )
    lines = profile_screen(found, advise(found), proof, tmp_path).splitlines()
    assert any(line.split() == ["waiting", "for", "data", "38%", "38%"] for line in lines)
    assert any(line.startswith("not launch-bound: ") for line in lines)
    assert any("predicted 1.61x, measured 1.51x" in line for line in lines)
    assert str(tmp_path) in lines[-1]
    assert len(lines) <= 40
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 110
    assert "\n".join(lines) == snapshot


def test_a_healthy_training_is_told_what_limits_it(tmp_path: Path) -> None:
    found = analyse_facts(ranks(HEALTHY, HEALTHY))
    assert "nothing to fix: 8" in profile_screen(found, (), None, tmp_path)
    assert '<b class="ok">nothing to fix</b>' in profile_page(found, (), None)


def test_many_ranks_fit_on_the_screen(tmp_path: Path) -> None:
    slow = {"forward_s": 0.06}
    found = analyse_facts(ranks(*([HEALTHY] * 40), slow, *([HEALTHY] * 23)))
    text = profile_screen(found, advise(found), None, tmp_path)
    assert "rank 40" in text.splitlines()[2]  # the one that the others wait for is shown
    assert "58 more ranks" in text
    assert "rank 63" in profile_page(found, advise(found), None)


def test_what_is_wrong_with_a_trace_is_said(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    found = profile(tmp_path)
    trace = found.ranks[0].trace
    assert trace is not None
    broken = dataclasses.replace(
        trace, truncated=True, unreadable=3, left_out=(21, 22), shortened=True
    )
    facts = dataclasses.replace(found.ranks[0].facts, trouble=("flops could not be counted",))
    one = dataclasses.replace(found.ranks[0], trace=broken, facts=facts)
    text = profile_screen(
        dataclasses.replace(found, ranks=(one, found.ranks[1])), (), None, tmp_path
    )
    troubles = [line for line in text.splitlines() if "rank 0" in line]
    assert troubles == snapshot


def test_a_trace_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    profile(tmp_path)
    (tmp_path / "rank-0.trace.json.gz").unlink()
    (tmp_path / "rank-1.trace.json.gz").write_text("{}")
    found = analyse_profile(tmp_path)
    text = profile_screen(found, advise(found), None, tmp_path)
    assert "the trace of rank 0" in text
    assert "rank-1.trace.json.gz" in text
    assert advise(found)[0].cause == "starved-loader"


def test_reading_many_traces_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    profile(tmp_path)
    monkeypatch.setattr(analysis, "_SAY_EVERY_S", 0.0)
    said: list[str] = []
    analyse_profile(tmp_path, say=said.append)
    assert [said[0], said[-1]] == snapshot


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        self.seen.append(tag)


def test_the_page_has_all_pictures_and_runs_nothing(tmp_path: Path) -> None:
    found = profile(tmp_path)
    text = profile_page(found, advise(found), None)
    tags = _Tags()
    tags.feed(text)
    assert tags.seen.count("svg") == 3
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert "aten::&lt;b&gt;mm&lt;/b&gt;" in text
    assert "<b>mm</b>" not in text
    assert "prefers-color-scheme" in text
    assert "operations of rank 1" in text


def test_pictures_are_whole_files(tmp_path: Path) -> None:
    found = profile(tmp_path)
    for draw in (shares_picture, step_picture, memory_picture):
        drawn = draw(found)
        assert drawn is not None
        ElementTree.fromstring(drawn)
    bare = analyse_facts([rank(0, ranks=1)])
    assert step_picture(bare) is None
    assert memory_picture(bare) is None
