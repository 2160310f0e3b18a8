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
    assert judge.suspects(Group(count).links) == []


def test_nothing_is_said_of_no_links() -> None:
    assert judge_links([]) == []


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


def test_windows_gets_its_own_command() -> None:
    found = the_only(Group(2, system="win32").change(0, 1, problem="timeout"))
    assert "New-NetFirewallRule" in found.fix
    assert "-RemoteAddress 10.0.0.1/32" in found.fix


def test_only_the_meeting_port_is_closed(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).change(1, 0, meeting_problem="refused"))
    assert found.name == "meeting-port-blocked"
    assert "--dport 29400 " in found.fix
    assert "32768" not in found.fix
    assert found == snapshot


def test_only_the_meeting_port_is_open(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).change(1, 0, problem="timeout", meeting_problem=""))
    assert found.name == "data-ports-blocked"
    assert "--dport 32768:60999 " in found.fix
    assert "29400 " not in found.fix
    assert found == snapshot


def test_where_both_are_closed_both_are_opened() -> None:
    found = the_only(Group(2).change(1, 0, problem="timeout", meeting_problem="timeout"))
    assert found.name == "blocked-dropped"
    assert "--dport 29400 " in found.fix
    assert "--dport 32768:60999 " in found.fix


def test_the_meeting_port_closed_to_all_is_one_finding(snapshot: SnapshotAssertion) -> None:
    group = Group(4)
    for place in (1, 2, 3):
        group.change(place, 0, meeting_problem="timeout")
    found = the_only(group)
    assert (found.name, named(found)) == ("meeting-port-blocked", {"node1"})
    assert found == snapshot


def test_a_machine_that_lets_nobody_in_is_named_once(snapshot: SnapshotAssertion) -> None:
    group = Group(4)
    for place in (0, 1, 3):
        group.change(place, 2, problem="prohibited")
    found = the_only(group)
    assert (found.name, named(found)) == ("blocked-prohibited", {"node3"})
    assert found == snapshot


def test_of_many_callers_the_network_is_let_in() -> None:
    group = Group(9)
    for place in range(1, 9):
        group.change(place, 0, problem="refused", meeting_problem="refused")
    fix = the_only(group).fix
    assert "-s 10.0.0.0/24 " in fix
    assert fix.count("iptables") == 2


def test_a_machine_that_reaches_nobody_is_named_once(snapshot: SnapshotAssertion) -> None:
    group = Group(3).change(1, 0, problem="no-route", meeting_problem="no-route")
    group.change(1, 2, problem="no-route")
    # Whoever calls it gets no answer, which only follows from that.
    group.change(0, 1, problem="timeout").change(2, 1, problem="timeout")
    found = the_only(group)
    assert (found.name, named(found)) == ("no-route", {"node2"})
    assert found.fix.endswith("sudo ip route replace 10.0.0.0/24 dev eth0")
    assert found == snapshot


def test_a_way_to_another_network_is_no_command(snapshot: SnapshotAssertion) -> None:
    group = Group(2)
    elsewhere = replace(group.ends[1], network="10.9.0.0/24", address="10.9.0.2")
    fix = the_only(group.change(0, 1, problem="no-route", target=elsewhere)).fix
    assert "ip route replace" not in fix
    assert "10.9.0.0/24" in fix
    assert fix == snapshot


def test_a_dead_link_is_one_finding_even_if_one_side_has_not_noticed(
    snapshot: SnapshotAssertion,
) -> None:
    group = Group(2).change(0, 1, problem="timeout")
    group.change(1, 0, problem="absent", meeting_problem="absent")
    found = the_only(group)
    assert (found.name, named(found)) == ("host-absent", {"node1", "node2"})
    assert found == snapshot


def test_silence_in_both_directions_may_be_two_firewalls_or_none(
    snapshot: SnapshotAssertion,
) -> None:
    group = Group(2).change(0, 1, problem="timeout")
    found = the_only(group.change(1, 0, problem="timeout", meeting_problem="timeout"))
    assert found.name == "blocked-dropped"
    assert found.fix.count("--dport") == 3  # into node2, and into node1 at both its ports
    assert "ip -br link show dev eth0" in found.fix
    assert found == snapshot


def test_two_machines_with_one_address_are_one_finding() -> None:
    group = Group(2).change(0, 1, problem="impostor")
    group.change(1, 0, problem="impostor", meeting_problem="impostor")
    assert [one.name for one in judge_links(group.links)] == ["wrong-machine-answers"]


def test_gloo_does_not_need_the_direction_that_it_does_not_use() -> None:
    unused = Group(2).change(0, 1, problem="timeout")  # the greater address calls
    needed = Group(2).change(1, 0, problem="timeout", meeting_problem="timeout")
    for group, with_gloo in ((unused, Status.WARNING), (needed, Status.FAILURE)):
        assert judge_links(group.links, both_ways=True)[0].status is Status.FAILURE
        assert judge_links(group.links, both_ways=False)[0].status is with_gloo


def test_what_could_not_be_tried_is_said_unless_it_is_explained(
    snapshot: SnapshotAssertion,
) -> None:
    group = Group(3).change(1, 0, problem=Problem.NOT_TRIED).change(1, 2, problem=Problem.NOT_TRIED)
    found = the_only(group)
    assert found.name == "links-not-tried"
    assert found.status is Status.WARNING
    assert found.what.startswith("node2 ")
    assert found == snapshot
    note = Finding(name="meeting-port-taken", status=Status.NOTE, what="port 29400 is taken")
    noted = replace(group.ends[1], findings=(note,))
    for other in (0, 2):
        group.change(1, other, source=noted).change(other, 1, target=noted)
    assert [one.name for one in judge_links(group.links)] == [
        "links-not-tried",
        "meeting-port-taken",
    ]
    cause = Finding(name="link-down", status=Status.FAILURE, what="node2 is not connected")
    explained = replace(group.ends[1], findings=(cause,))
    for other in (0, 2):
        group.change(1, other, source=explained).change(other, 1, target=explained)
    assert judge_links(group.links) == [cause]


# ---- links that hurt


def test_a_slow_direction_is_named_as_that(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).figures(0, 1, **SLOW))
    assert found.name == "slow-link"
    assert found.status is Status.WARNING
    assert "from node1 to node2" in found.what
    assert "96 Mbit/s" in found.what
    assert found == snapshot


def test_a_slow_link_between_two_is_named_once(snapshot: SnapshotAssertion) -> None:
    assert named(the_only(Group(2).both(0, 1, **SLOW))) == {"node1", "node2"}
    found = the_only(Group(4).both(1, 3, **SLOW))
    assert (found.name, named(found)) == ("slow-link", {"node2", "node4"})
    assert found == snapshot


def test_a_machine_whose_links_are_all_slow_is_named(snapshot: SnapshotAssertion) -> None:
    group = Group(4)
    for place in (0, 1, 3):
        group.both(place, 2, **SLOW)
    found = the_only(group)
    assert (found.name, named(found)) == ("slow-link", {"node3"})
    assert found == snapshot(name="both directions")
    group = Group(4)
    for place in (0, 1, 3):
        group.figures(2, place, **SLOW)
    found = the_only(group)
    assert (found.name, named(found)) == ("slow-link", {"node3"})
    assert found.what == snapshot(name="one direction")


def test_two_machines_that_are_slow_are_two_findings() -> None:
    group = Group(5)
    for place in (0, 2, 3, 4):
        group.both(place, 1, **SLOW)
    for place in (0, 1, 2, 4):
        group.both(place, 3, **SLOW)
    found = judge_links(group.links)
    assert [(one.name, named(one)) for one in found] == [
        ("slow-link", {"node2"}),
        ("slow-link", {"node4"}),
    ]


def test_a_slower_link_among_fast_ones_is_slow_and_among_its_like_it_is_not() -> None:
    gigabit = {"bytes_per_s": 117e6}
    found = the_only(Group(4).both(0, 1, **gigabit))
    assert (found.name, named(found)) == ("slow-link", {"node1", "node2"})
    assert "936 Mbit/s" in found.what
    group = Group(3)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        group.both(one, other, **gigabit)
    assert judge_links(group.links) == []


def test_a_busy_host_does_not_make_a_link_slow() -> None:
    assert judge_links(Group(2).both(0, 1, bytes_per_s=60e6, waited_share=0.8).links) == []
    assert judge_links(Group(3).both(0, 1, bytes_per_s=150e6, waited_share=0.6).links) == []
    # On a slow link it has little to do, and waits in vain.
    assert len(judge_links(Group(2).both(0, 1, bytes_per_s=12e6, waited_share=0.6).links)) == 1


def test_a_long_way(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).both(0, 1, round_trip_s=0.1, bytes_per_s=1e5))
    assert found.name == "high-latency"
    assert "100 ms" in found.what
    assert found == snapshot


def test_a_longer_way_than_the_others() -> None:
    found = the_only(Group(4).both(0, 3, round_trip_s=0.002))
    assert (found.name, named(found)) == ("high-latency", {"node1", "node4"})
    assert "2 ms" in found.what


STALL = {"stalled": True, "bytes_per_s": None}


def test_large_transfers_that_stall(snapshot: SnapshotAssertion) -> None:
    group = Group(2, mtu_bytes=9000).both(0, 1, **STALL)
    found = the_only(group)
    assert (found.name, found.status) == ("stalled-link", Status.FAILURE)
    assert found.fix.count("ip link set dev eth0 mtu 1500") == 2
    assert found == snapshot
    assert judge.suspects(group.links) == [(0, 1)]


def test_only_the_end_with_large_frames_is_changed() -> None:
    group = Group(2)
    large = replace(group.ends[1], mtu_bytes=9000)
    group.figures(0, 1, **STALL).change(0, 1, target=large)
    fix = the_only(group).fix
    assert "on node2:\nsudo ip link set dev eth0 mtu 1500" in fix
    assert "on node1" not in fix
    assert the_only(Group(2).both(0, 1, **STALL)).fix.count("mtu 1400") == 2


def test_changed_data_is_a_failure_before_all_else(snapshot: SnapshotAssertion) -> None:
    found = the_only(Group(2).figures(0, 1, wrong_bytes=3, bytes_per_s=1e6))
    assert (found.name, found.status) == ("corrupting-link", Status.FAILURE)
    assert "from node1 to node2" in found.what
    assert "3 bytes" in found.evidence
    assert found == snapshot


def test_a_link_that_cannot_be_measured_stalls() -> None:
    group = Group(2).change(0, 1, figures=None, tries=3)
    found = the_only(group.change(1, 0, figures=None, tries=3))
    assert found.name == "stalled-link"
    assert "could not be measured in 3 tries" in found.evidence


def test_whatever_looks_bad_is_measured_again() -> None:
    assert judge.suspects(Group(3).both(0, 2, **SLOW).links) == [(0, 2)]


# ---- the best of several tries


def test_of_several_tries_the_best_counts() -> None:
    first = msgspec.structs.replace(GOOD, bytes_per_s=1e6, round_trip_s=0.5, stalled=True)
    assert first.best_with(GOOD) == GOOD


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
