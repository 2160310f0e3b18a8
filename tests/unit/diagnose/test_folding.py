"""What many machines have in common is told once."""

from torchmuster.diagnose.group import merge_findings
from torchmuster.finding import Finding, Status


def finding(what: str = "little memory", **changes: str) -> Finding:
    return Finding(name="memory", status=Status.WARNING, what=what, **changes)


def test_what_is_the_same_is_told_once_with_all_names() -> None:
    found = merge_findings({"node1": [finding()], "node2": [], "node3": [finding()]})
    assert [one.what for one in found] == ["node1 and node3: little memory"]


def test_what_differs_is_told_apart() -> None:
    found = merge_findings({"node1": [finding()], "node2": [finding("no memory")]})
    assert [one.what for one in found] == ["node1: little memory", "node2: no memory"]
    found = merge_findings({"node1": [finding(fix="buy 1")], "node2": [finding(fix="buy 2")]})
    assert [one.what for one in found] == ["node1: little memory", "node2: little memory"]


def test_hosts_are_data_whatever_their_names_are() -> None:
    (found,) = merge_findings({"a": [finding("a process may have only 1,024 files open")]})
    assert found.hosts == ("a",)
    assert found.what == "a: a process may have only 1,024 files open"
