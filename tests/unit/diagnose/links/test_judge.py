"""What is said about links, of groups that do not exist: the fault, the direction, whom to blame."""

import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose.links import judge
from torchmuster.diagnose.links.judge import judge_links
from torchmuster.diagnose.links.model import Problem
from torchmuster.finding import Finding, Status
from unit.diagnose.links.made_up import GOOD, Group

SLOW = {"bytes_per_s": 12e6}


def named(finding: Finding) -> set[str]:
    """The machines that a finding names."""
    return set(re.findall(r"node\d+", finding.what))


def the_only(group: Group) -> Finding:
    (found,) = judge_links(group.links)
    return found


@pytest.mark.parametrize("count", [2, 3, 9])
def test_good_links_are_not_worth_a_word(count: int) -> None:
    assert judge_links(Group(count).links) == []
    assert judge.faults_of(Group(count).links) == {}


# ---- machines that do not reach each other


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        ("timeout", "blocked-dropped"),
        ("refused", "blocked-rejected"),
        ("prohibited", "blocked-prohibited"),
        ("absent", "host-absent"),
        ("no-route", "no-route"),
        ("impostor", "wrong-machine-answers"),
    ],
)
def test_each_problem_has_its_name(problem: str, name: str, snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).change(0, 1, problem=problem, seconds=5.0))
    assert found.name == name
    assert found.status is Status.FAILURE
    assert "10.0.0.2:40000" in found.evidence
    assert found.why
    assert found.fix
    assert found == snapshot


def test_a_firewall_is_opened_for_the_caller_alone_at_the_ports_that_are_needed(
    snapshot: SnapshotAssertion,
) -> None:
    found = the_only(Group(2, given_out_ports=(50000, 50100)).change(0, 1, problem="timeout"))
    _, ufw, firewalld, iptables = found.fix.splitlines()
    for command in (ufw, firewalld, iptables):
        assert "10.0.0.1/32" in command
    assert "50000:50100" in ufw
    assert "50000-50100" in firewalld
    assert "--dport 50000:50100 -j ACCEPT" in iptables
    assert found.fix == snapshot


def test_only_the_rendezvous_port_is_closed(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).change(1, 0, rendezvous_problem="refused"))
    assert found.name == "rendezvous-port-blocked"
    assert "--dport 29400 " in found.fix
    assert "32768" not in found.fix
    assert found == snapshot


def test_only_the_rendezvous_port_is_open(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).change(1, 0, problem="timeout", rendezvous_problem=""))
    assert found.name == "data-ports-blocked"
    assert "--dport 32768:60999 " in found.fix
    assert "29400 " not in found.fix
    assert found == snapshot


def test_the_rendezvous_port_closed_to_all_is_one_finding(snapshot: SnapshotAssertion) -> None:
    group = Group(4)
    for place in (1, 2, 3):
        group.change(place, 0, rendezvous_problem="timeout")
    found = the_only(group)
    assert (found.name, named(found)) == ("rendezvous-port-blocked", {"node1"})
    assert found == snapshot


def test_a_machine_that_lets_nobody_in_is_named_once(snapshot: SnapshotAssertion) -> None:
    group = Group(4)
    for place in (0, 1, 3):
        group.change(place, 2, problem="prohibited")
    found = the_only(group)
    assert (found.name, named(found)) == ("blocked-prohibited", {"node3"})
    assert found == snapshot


def test_a_machine_that_reaches_nobody_is_named_once(snapshot: SnapshotAssertion) -> None:
    group = Group(3).change(1, 0, problem="no-route", rendezvous_problem="no-route")
    group.change(1, 2, problem="no-route")
    # Whoever calls it gets no answer, which only follows from that.
    group.change(0, 1, problem="timeout").change(2, 1, problem="timeout")
    found = the_only(group)
    assert (found.name, named(found)) == ("no-route", {"node2"})
    assert found.fix.endswith("sudo ip route replace 10.0.0.0/24 dev eth0")
    assert found == snapshot


def test_a_dead_link_is_one_finding_even_if_one_side_has_not_noticed(
    snapshot: SnapshotAssertion,
) -> None:
    group = Group(2).change(0, 1, problem="timeout")
    group.change(1, 0, problem="absent", rendezvous_problem="absent")
    found = the_only(group)
    assert (found.name, named(found)) == ("host-absent", {"node1", "node2"})
    assert found == snapshot


def test_silence_in_both_directions_may_be_two_firewalls_or_none(
    snapshot: SnapshotAssertion,
) -> None:
    group = Group(2).change(0, 1, problem="timeout")
    found = the_only(group.change(1, 0, problem="timeout", rendezvous_problem="timeout"))
    assert found.name == "blocked-dropped"
    assert found.fix.count("--dport") == 3  # into node2, and into node1 at both its ports
    assert "ip -br link show dev eth0" in found.fix
    assert found == snapshot


def test_what_could_not_be_tried_is_said_unless_it_is_explained(
    snapshot: SnapshotAssertion,
) -> None:
    group = Group(3).change(1, 0, problem=Problem.NOT_TRIED).change(1, 2, problem=Problem.NOT_TRIED)
    found = the_only(group)
    assert found.name == "links-not-tried"
    assert found.status is Status.WARNING
    assert found.what.startswith("node2 ")
    assert found == snapshot
    note = Finding(name="rendezvous-port-taken", status=Status.NOTE, what="port 29400 is taken")
    noted = replace(group.ends[1], findings=(note,))
    for other in (0, 2):
        group.change(1, other, source=noted).change(other, 1, target=noted)
    assert [one.name for one in judge_links(group.links)] == [
        "links-not-tried",
        "rendezvous-port-taken",
    ]
    cause = Finding(name="link-down", status=Status.FAILURE, what="node2 is not connected")
    explained = replace(group.ends[1], findings=(cause,))
    for other in (0, 2):
        group.change(1, other, source=explained).change(other, 1, target=explained)
    assert judge_links(group.links) == [cause]


# ---- links that hurt


def test_a_slow_link_between_two_is_named_once(snapshot: SnapshotAssertion) -> None:
    assert named(the_only(Group(2).figures(0, 1, **SLOW))) == {"node1", "node2"}
    found = the_only(Group(4).figures(1, 3, **SLOW))
    assert (found.name, named(found)) == ("slow-link", {"node2", "node4"})
    assert found == snapshot


def test_a_machine_whose_links_are_all_slow_is_named(snapshot: SnapshotAssertion) -> None:
    group = Group(4)
    for place in (0, 1, 3):
        group.figures(place, 2, **SLOW)
    found = the_only(group)
    assert (found.name, named(found)) == ("slow-link", {"node3"})
    assert found == snapshot


STALL = {"bytes_per_s": None}


def test_large_transfers_that_stall(snapshot: SnapshotAssertion) -> None:
    group = Group(2, mtu_bytes=9000).figures(0, 1, **STALL)
    found = the_only(group)
    assert (found.name, found.status) == ("stalled-link", Status.FAILURE)
    assert found.fix.count("ip link set dev eth0 mtu 1500") == 2
    assert found == snapshot


def test_changed_data_is_a_failure_before_all_else(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).figures(0, 1, wrong_bytes=3, bytes_per_s=1e6))
    assert (found.name, found.status) == ("corrupting-link", Status.FAILURE)
    assert named(found) == {"node1", "node2"}
    assert "3 bytes" in found.evidence
    assert found == snapshot


# ---- the best of several tries


def test_wrong_bytes_are_never_forgiven() -> None:
    assert msgspec.structs.replace(GOOD, wrong_bytes=2).best_with(GOOD).wrong_bytes == 2
    assert GOOD.best_with(msgspec.structs.replace(GOOD, wrong_bytes=2)).wrong_bytes == 2


@given(st.integers(3, 7), st.data())
def test_whatever_is_blocked_every_blocked_link_is_in_the_evidence_or_its_machine_named(
    count: int, data: st.DataObject
) -> None:
    group = Group(count)
    pairs = [link.places for link in group.links if link.target.place != 0]
    bad = data.draw(st.sets(st.sampled_from(pairs)))
    for source, target in bad:
        group.change(source, target, problem="refused")
    text = "\n".join(f"{one.what}\n{one.fix}" for one in judge_links(group.links))
    for source, target in bad:
        assert f"node{target + 1}" in text
        everybody = {(other, target) for other in range(count) if other != target}
        assert f"node{source + 1}" in text or everybody <= bad
    assert bool(bad) == bool(text)
