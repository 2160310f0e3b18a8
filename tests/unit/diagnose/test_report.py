"""The report in all its forms: what people read, what programs read, and what machines may not do to it."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose import report
from torchmuster.diagnose.rank_record import Operation
from torchmuster.diagnose.result import GroupResult, failing_hosts
from torchmuster.finding import Finding, Status
from unit.diagnose.made_up import FINDING, WRONG, group, link, machine, rank


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
    assert "links: 3 of 4 directions connect" in text
    assert f"failure  {FINDING.what}" in text
    assert text == snapshot


# ---- the page and the data


HOSTILE = "<script>alert('x')</script>\"&"


def hostile() -> GroupResult:
    one, two = machine(0, HOSTILE), machine(1, f"b{HOSTILE}", missing=HOSTILE)
    texts = dict.fromkeys(("what", "why", "fix", "evidence"), HOSTILE)
    return GroupResult(
        machines=(one, two),
        findings=(Finding(name=HOSTILE, status=Status.FAILURE, **texts),),
        links=(link(one, two), link(two, one, problem="refused")),
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
        "rendezvous_problem": None,
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


def test_failing_hosts_are_listed_with_the_fewest_for_links() -> None:
    def failure(*hosts: str) -> Finding:
        return dataclasses.replace(FINDING, hosts=hosts)

    warning = dataclasses.replace(FINDING, status=Status.WARNING, hosts=("node1",))
    alone = dataclasses.replace(troubled(), findings=(warning,))
    assert failing_hosts(alone) == ["node4"]  # which is not connected
    findings = (failure("node1", "node2"), failure("node3", "node2"), failure("node1", "node4"))
    assert failing_hosts(dataclasses.replace(alone, findings=findings)) == ["node4", "node2"]
