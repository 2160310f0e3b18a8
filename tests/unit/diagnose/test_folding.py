"""What many machines have in common is told once."""

from torchmuster.diagnose.group import deduplicate_findings
from torchmuster.finding import Finding, Status


def finding(what: str = "little memory", **changes: str) -> Finding:
    return Finding(name="memory", status=Status.WARNING, what=what, **changes)


def test_what_is_the_same_is_told_once_with_all_names() -> None:
    found = deduplicate_findings({"node1": [finding()], "node2": [], "node3": [finding()]})
    assert [one.what for one in found] == ["node1 and node3: little memory"]


def test_what_differs_is_told_apart() -> None:
    found = deduplicate_findings({"node1": [finding()], "node2": [finding("no memory")]})
    assert [one.what for one in found] == ["node1: little memory", "node2: no memory"]
    found = deduplicate_findings({"node1": [finding(fix="buy 1")], "node2": [finding(fix="buy 2")]})
    assert [one.what for one in found] == ["node1: little memory", "node2: little memory"]


def test_different_evidence_of_the_same_says_whose_it_is() -> None:
    found = deduplicate_findings(
        {"a": [finding(evidence="3 MiB")], "b": [finding(evidence="4 MiB")]}
    )
    assert found[0].evidence == "a: 3 MiB\nb: 4 MiB"
    found = deduplicate_findings(
        {"a": [finding(evidence="3 MiB")], "b": [finding(evidence="3 MiB")]}
    )
    assert found[0].evidence == "3 MiB"


def test_a_finding_that_names_its_machine_is_not_given_the_name_twice() -> None:
    assert deduplicate_findings({"node1": [finding("node1 is full")]})[0].what == "node1 is full"


def test_of_one_machine_alone_no_name_is_needed_and_what_is_well_is_left_out() -> None:
    well = Finding(name="memory", status=Status.OK, what="8 GiB")
    assert deduplicate_findings({"node1": [finding(), well]}, named=False) == [finding()]
