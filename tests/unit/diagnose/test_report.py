"""The report in all its forms: what people read, what programs read, and what machines may not do to it."""

import dataclasses
import json

from msgspec.structs import replace
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose import report
from torchmuster.diagnose.rank_record import Operation
from torchmuster.diagnose.result import GroupResult, failing_hosts
from torchmuster.finding import Finding, Status
from unit.diagnose.made_up import FINDING, WRONG, link, machine, rank


def troubled() -> GroupResult:
    one, two, three = (machine(place) for place in range(3))
    return GroupResult(
        machines=(
            one,
            replace(two, devices=("NVIDIA A100",) * 8, clock_offset_s=-61.5),
            replace(three, ranks=None),
            machine(3, missing="ssh: connect to host node4 port 22: Connection refused"),
        ),
        findings=(FINDING, Finding(name="n", status=Status.NOTE, what="a note")),
        links=(
            link(one, two, 1.2e9),
            link(two, one, 11e6),
            link(one, three, problem="timeout"),
            link(three, one, 1.1e9),
        ),
        ranks=(
            rank(0, operations=(Operation(name="all-gather", values=WRONG, wrong_from={1: 1}),)),
        ),
        not_tried=("ranks on node3, because of the findings",),
        seconds=12.3,
    )


def test_the_text_has_machines_links_and_findings(snapshot: SnapshotAssertion) -> None:
    text = report.check_text(troubled())
    rows = [line.split() for line in text.splitlines()]
    assert ["node2", "1", "8", "x", "NVIDIA", "A100", "2"] in [row[:7] for row in rows]
    assert "links: 3 of 4 directions connect; slowest 0.088 Gbit/s" in text
    assert f"failure  {FINDING.what}" in text
    assert text == snapshot


def test_machines_cannot_control_the_terminal() -> None:
    hostile = "\x1b[2Jnode"
    missing = machine(0, hostile, missing=hostile)
    text = report.check_text(GroupResult(machines=(missing,), findings=()))
    assert "\x1b" not in text


def test_the_data_are_whole_and_have_a_version() -> None:
    told = report.check_json(troubled())
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {
        *("schema", "passed", "seconds", "machines", "findings", "not_tried", "links", "ranks")
    }
    assert (told["schema"], told["passed"], told["seconds"]) == (1, False, 12.3)
    assert told["findings"][0]["name"] == FINDING.name
    assert told["findings"][0]["status"] == "failure"
    assert told["links"][0]["speed"] == {"bytes_per_s": 1.2e9, "wrong_bytes": 0}
    assert told["links"][2]["problem"] == "timeout"


def test_failing_hosts_are_listed_with_the_fewest_for_links() -> None:
    def failure(*hosts: str) -> Finding:
        return dataclasses.replace(FINDING, hosts=hosts)

    warning = dataclasses.replace(FINDING, status=Status.WARNING, hosts=("node1",))
    assert failing_hosts([warning]) == []
    findings = [failure("node4"), failure("node1", "node2"), failure("node3", "node2")]
    assert failing_hosts([*findings, failure("node1", "node4")]) == ["node4", "node2"]
