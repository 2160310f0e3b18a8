"""The report in all its forms: what people read, what programs read, and what machines may not do to it."""

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose import report
from torchmuster.diagnose.rank_record import Operation, Pair
from torchmuster.diagnose.report.grid import (
    grid_of_hosts,
    grid_of_ranks,
    speed_text,
)
from torchmuster.diagnose.result import GroupResult, failing_hosts
from torchmuster.finding import Finding, Status
from unit.diagnose.report.made_up import FINDING, WRONG, group, link, machine, rank


def troubled() -> GroupResult:
    one, two, three = (machine(place) for place in range(3))
    return GroupResult(
        machines=(
            one,
            dataclasses.replace(two, devices=("NVIDIA A100",) * 8, clock_offset_s=-61.5),
            dataclasses.replace(three, torch=None, ranks=None),
            machine(3, missing="ssh: connect to host node4 port 22: Connection refused"),
        ),
        findings=(FINDING, Finding(name="n", status=Status.NOTE, what="a note")),
        links=(
            link(one, two, 1.2e9),
            link(two, one, 11e6),
            link(one, three, problem="timeout"),
            link(three, one, 1.1e9),
        ),
        not_tried=("ranks: node3 has no torch",),
        seconds=12.3,
    )


# ---- the terminal


def test_the_text_has_machines_links_and_findings(snapshot: SnapshotAssertion) -> None:
    text = report.check_text(troubled())
    rows = [line.split() for line in text.splitlines()]
    assert ["node2", "1", "8", "x", "NVIDIA", "A100", "2"] in [row[:7] for row in rows]
    assert "9.6 Gbit/s" in text  # from node1 to node2
    assert f"failure  {FINDING.what}" in text
    assert text == snapshot


def test_ranks_of_one_machine_are_shown_two_by_two(snapshot: SnapshotAssertion) -> None:
    alone = group(1, links=(), ranks=(rank(0, host="here"), rank(1, host="here")))
    text = report.check_text(alone)
    assert text.splitlines()[-2:] == [
        "0 here           -  8.0 Gbit/s",
        "1 here  8.0 Gbit/s           -",
    ]
    assert text == snapshot


def test_of_many_machines_the_worst_links_are_listed(snapshot: SnapshotAssertion) -> None:
    many = group(300, pairs_each=4)
    blocked = link(many.machines[5], many.machines[200], problem="refused")
    many = dataclasses.replace(
        many,
        links=(*many.links, blocked, link(many.machines[9], many.machines[100], 1e6)),
    )
    lines = report.check_text(many).splitlines()
    start = next(place for place, line in enumerate(lines) if "1202" in line)
    assert lines[start + 1].split() == ["node6", "to", "node201", "refused"]
    assert lines[start + 2].split() == ["node10", "to", "node101", "8.0", "Mbit/s"]
    assert len(lines) < 100
    assert [*lines[start : start + 3], lines[start + 21]] == snapshot


@pytest.mark.parametrize(
    ("bytes_per_s", "told"),
    [(1.25e9, "10 Gbit/s"), (1.17e9, "9.4 Gbit/s"), (12.5e6, "100 Mbit/s"), (3, "24 bit/s")],
)
def test_speeds_are_told_as_networks_are_sold(bytes_per_s: float, told: str) -> None:
    assert speed_text(bytes_per_s) == told


# ---- the grid of links


def test_where_neighbours_are_put_together_the_worst_shows() -> None:
    many = group(300, pairs_each=9)
    first = dataclasses.replace(many.links[0], problem="timeout", figures=None)
    grid = grid_of_hosts(dataclasses.replace(many, links=(first, *many.links[1:])))
    assert grid is not None
    assert (grid.together, grid.names[0]) == (10, "node1 … node10")
    shown = grid.cells[0][0]
    assert shown is not None
    assert (shown.source, shown.target, shown.problem) == ("node1", "node2", "timeout")


def test_ranks_that_got_wrong_values_have_a_cross() -> None:
    spoiled = Pair(peer=1, values=WRONG)
    grid = grid_of_ranks(group(1, links=(), ranks=(rank(0, pairs=(spoiled,)), rank(1))))
    assert grid is not None
    cell = grid.cells[1][0]
    assert cell is not None
    assert (cell.source, cell.target, cell.problem) == ("rank 1", "rank 0", "wrong")


def test_ranks_of_separate_groups_are_not_put_into_one_picture() -> None:
    assert grid_of_ranks(group(2, links=(), ranks=(rank(0), rank(1), rank(0), rank(1)))) is None


# ---- the page and the data


HOSTILE = "<script>alert('x')</script>\"&"


def hostile() -> GroupResult:
    one, two = machine(0, HOSTILE), machine(1, f"b{HOSTILE}", missing=HOSTILE)
    texts = dict.fromkeys(("what", "why", "fix", "evidence"), HOSTILE)
    return GroupResult(
        machines=(one, two),
        findings=(Finding(name=HOSTILE, status=Status.FAILURE, **texts),),
        links=(link(one, two), link(two, one, problem=HOSTILE)),
        ranks=(rank(0, host=HOSTILE, device_name=HOSTILE), rank(1, stage=HOSTILE, ended=False)),
        not_tried=(HOSTILE,),
    )


def test_whatever_machines_call_themselves_it_stays_text() -> None:
    text = report.check_page(hostile())
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in text


@pytest.mark.parametrize("result", [group(4), troubled(), hostile(), group(300, pairs_each=3)])
def test_the_page_needs_nothing_else(result: GroupResult) -> None:
    text = report.check_page(result)
    assert "default-src 'none'" in text
    assert re.findall(r"""(?:src|href)\s*=\s*["']""", text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert "@import" not in text
    assert "url(" not in text
    body = re.sub(r"<meta[^>]*>|<!doctype html>", "", text)
    ElementTree.fromstring(body.replace("<details open>", '<details open="">'))  # all tags closed


def test_the_verdict_is_the_headline() -> None:
    assert '<b class="ok">passed</b>' in report.check_page(group(2))
    warned = group(2, findings=(dataclasses.replace(FINDING, status=Status.WARNING),))
    assert '<b class="warning">passed, with warnings</b>' in report.check_page(warned)
    assert '<b class="failure">failed</b>' in report.check_page(troubled())


def test_the_data_are_whole_and_have_a_version() -> None:
    told = report.check_json(troubled())
    assert json.loads(json.dumps(told)) == told
    assert list(told) == [
        *("schema", "passed", "seconds", "machines", "findings", "not_tried", "links", "ranks")
    ]
    assert (told["schema"], told["passed"], told["seconds"]) == (1, False, 12.3)
    assert told["findings"][0] == FINDING.as_json()
    assert told["links"][0] == {
        "from": "node1",
        "to": "node2",
        "address": "10.77.0.1",
        "problem": "",
        "meeting_problem": None,
        "bytes_per_s": 1.2e9,
        "round_trip_s": 0.0002,
        "stalled": False,
        "wrong_bytes": 0,
    }
    assert told["links"][2]["problem"] == "timeout"
    gathered = Operation(name="all-gather", values=WRONG, wrong_from={1: 1})
    ranked = report.check_json(group(2, ranks=(rank(0, operations=(gathered,)), rank(1))))["ranks"]
    assert json.loads(json.dumps(ranked)) == ranked
    assert [one["rank"] for one in ranked] == [0, 1]


def test_writing_puts_three_files_there(tmp_path: Path) -> None:
    report.write_check_report(tmp_path / "run", troubled())
    written = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert written == ["check.json", "failing-nodes.txt", "report.html"]
    assert json.loads((tmp_path / "run/check.json").read_text("utf-8"))["schema"] == 1


def test_failing_hosts_are_listed_with_the_fewest_for_links() -> None:
    def failure(*hosts: str) -> Finding:
        return dataclasses.replace(FINDING, hosts=hosts)

    warning = dataclasses.replace(FINDING, status=Status.WARNING, hosts=("node1",))
    alone = dataclasses.replace(troubled(), findings=(warning,))
    assert failing_hosts(alone) == ["node4"]  # which is not connected
    findings = (failure("node1", "node2"), failure("node3", "node2"), failure("node1", "node4"))
    assert failing_hosts(dataclasses.replace(alone, findings=findings)) == ["node4", "node2"]


def test_a_note_keeps_to_its_headline_on_the_terminal_and_comes_after_the_picture_on_the_page() -> (
    None
):
    note = Finding(name="load-high", status=Status.NOTE, what="busy", why="others", fix="ps -e")
    warning = Finding(name="memory", status=Status.WARNING, what="small", why="a quota", fix="more")
    result = group(3, findings=(note, warning))
    told = report.check_text(result)
    assert "note     busy" in told
    assert "ps -e" not in told
    assert "fix  more" in told
    written = report.check_page(result)
    assert "ps -e" in written
    places = [written.index(part) for part in ("small", "links between hosts", "busy")]
    assert places == sorted(places)
