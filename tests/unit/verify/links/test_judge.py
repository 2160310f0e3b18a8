"""What is said about links, of groups that do not exist: the fault, the direction, whom to blame."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.finding import Finding, Status
from torchmuster.verify.links import quality
from torchmuster.verify.links.judge import judge
from torchmuster.verify.links.model import NOT_TRIED
from unit.verify.links.made_up import GOOD, Group

SLOW = {"bytes_per_s": 12e6}


def said(group: Group) -> list[str]:
    return [f"{one.name}: {one.what}" for one in judge(group.links)]


def the_only(group: Group) -> Finding:
    (found,) = judge(group.links)
    return found


@pytest.mark.parametrize("count", [2, 3, 9])
def test_good_links_are_not_worth_a_word(count: int) -> None:
    assert judge(Group(count).links) == []
    assert quality.suspects(Group(count).links) == []


def test_nothing_is_said_of_no_links() -> None:
    assert judge([]) == []


# ---- machines that do not reach each other


@pytest.mark.parametrize(
    ("problem", "name", "words"),
    [
        ("timeout", "blocked-dropped", "its packets are dropped"),
        ("refused", "blocked-rejected", "it is refused"),
        ("prohibited", "blocked-prohibited", "it is prohibited"),
        ("absent", "host-absent", "nobody answers at that address"),
        ("no-route", "no-route", "it has no route to it"),
        ("impostor", "wrong-machine-answers", "another machine answers"),
    ],
)
def test_each_problem_has_its_name(problem: str, name: str, words: str) -> None:
    found = the_only(Group(2).change(0, 1, problem=problem, seconds=5.0))
    assert found.name == name
    assert found.status is Status.FAILURE
    assert found.what == (
        f"node1 does not reach node2 at 10.0.0.2: {words}; the other direction works"
    )
    assert found.evidence == f"node1 to node2 at 10.0.0.2:40000: {problem} after 5.0 s"
    assert found.why
    assert found.fix


def test_a_firewall_is_opened_for_the_caller_alone_at_the_ports_that_are_needed() -> None:
    found = the_only(Group(2, given_out_ports=(50000, 50100)).change(0, 1, problem="timeout"))
    assert found.fix.splitlines() == [
        "let node1 in at node2:",
        "sudo ufw allow from 10.0.0.1/32 to any port 50000:50100 proto tcp  # Ubuntu",
        'sudo firewall-cmd --add-rich-rule=\'rule family="ipv4" source address="10.0.0.1/32" '
        'port port="50000-50100" protocol="tcp" accept\'  # Fedora, RHEL, SUSE',
        "sudo iptables -I INPUT -s 10.0.0.1/32 -p tcp --dport 50000:50100 -j ACCEPT  # others",
    ]


def test_windows_gets_its_own_command() -> None:
    found = the_only(Group(2, system="win32").change(0, 1, problem="timeout"))
    assert "New-NetFirewallRule" in found.fix
    assert "-RemoteAddress 10.0.0.1/32" in found.fix


def test_only_the_meeting_port_is_closed() -> None:
    found = the_only(Group(2).change(1, 0, meeting_problem="refused"))
    assert found.name == "meeting-port-blocked"
    assert found.what == (
        "node2 does not reach node1 at the meeting port 29400, only at others: it is refused"
    )
    assert "--dport 29400 " in found.fix
    assert "32768" not in found.fix
    assert found.evidence == "node2 to node1 at 10.0.0.1:29400: refused; at port 40000: reached"


def test_only_the_meeting_port_is_open() -> None:
    found = the_only(Group(2).change(1, 0, problem="timeout", meeting_problem=""))
    assert found.name == "data-ports-blocked"
    assert found.what == (
        "node2 does not reach node1 except at the meeting port 29400: its packets are dropped"
    )
    assert "--dport 32768:60999 " in found.fix
    assert "29400 " not in found.fix


def test_where_both_are_closed_both_are_opened() -> None:
    found = the_only(Group(2).change(1, 0, problem="timeout", meeting_problem="timeout"))
    assert found.name == "blocked-dropped"
    assert "--dport 29400 " in found.fix
    assert "--dport 32768:60999 " in found.fix


def test_the_meeting_port_closed_to_all_is_one_finding() -> None:
    group = Group(4)
    for place in (1, 2, 3):
        group.change(place, 0, meeting_problem="timeout")
    assert said(group) == [
        "meeting-port-blocked: no other machine reaches node1 at the meeting port 29400, only at "
        "others: its packets are dropped"
    ]


def test_a_machine_that_lets_nobody_in_is_named_once() -> None:
    group = Group(4)
    for place in (0, 1, 3):
        group.change(place, 2, problem="prohibited")
    assert said(group) == [
        "blocked-prohibited: no other machine reaches node3 at 10.0.0.3: it is prohibited; the "
        "other direction works"
    ]


def test_of_many_callers_the_network_is_let_in() -> None:
    group = Group(9)
    for place in range(1, 9):
        group.change(place, 0, problem="refused", meeting_problem="refused")
    fix = the_only(group).fix
    assert "-s 10.0.0.0/24 " in fix
    assert fix.count("iptables") == 2


def test_a_machine_that_reaches_nobody_is_named_once() -> None:
    group = Group(3).change(1, 0, problem="no-route", meeting_problem="no-route")
    group.change(1, 2, problem="no-route")
    # Whoever calls it gets no answer, which only follows from that.
    group.change(0, 1, problem="timeout").change(2, 1, problem="timeout")
    found = the_only(group)
    assert found.what == "node2 reaches no other machine: it has no route to it"
    assert found.fix == "on node2:\nsudo ip route replace 10.0.0.0/24 dev eth0"


def test_a_way_to_another_network_is_no_command() -> None:
    group = Group(2)
    elsewhere = replace(group.ends[1], network="10.9.0.0/24", address="10.9.0.2")
    fix = the_only(group.change(0, 1, problem="no-route", target=elsewhere)).fix
    assert "ip route replace" not in fix
    assert "connect node1 to the network 10.9.0.0/24 (it has 10.0.0.1)" in fix


def test_a_dead_link_is_one_finding_even_if_one_side_has_not_noticed() -> None:
    group = Group(2).change(0, 1, problem="timeout")
    group.change(1, 0, problem="absent", meeting_problem="absent")
    assert said(group) == [
        "host-absent: node1 and node2 do not reach each other: nobody answers at that address"
    ]


def test_silence_in_both_directions_may_be_two_firewalls_or_none() -> None:
    group = Group(2).change(0, 1, problem="timeout")
    found = the_only(group.change(1, 0, problem="timeout", meeting_problem="timeout"))
    assert found.what == (
        "node1 and node2 do not reach each other: nothing passes in either direction"
    )
    assert "let node1 in at node2" in found.fix
    assert "let node2 in at node1" in found.fix
    assert "ip -br link show dev eth0" in found.fix


def test_two_machines_with_one_address_are_one_finding() -> None:
    group = Group(2).change(0, 1, problem="impostor")
    group.change(1, 0, problem="impostor", meeting_problem="impostor")
    assert [one.name for one in judge(group.links)] == ["wrong-machine-answers"]


def test_gloo_does_not_need_the_direction_that_it_does_not_use() -> None:
    unused = Group(2).change(0, 1, problem="timeout")  # the greater address calls
    needed = Group(2).change(1, 0, problem="timeout", meeting_problem="timeout")
    for group, with_gloo in ((unused, Status.WARNING), (needed, Status.FAILURE)):
        assert judge(group.links, both_ways=True)[0].status is Status.FAILURE
        assert judge(group.links, both_ways=False)[0].status is with_gloo


def test_what_could_not_be_tried_is_said_unless_it_is_explained() -> None:
    group = Group(3).change(1, 0, problem=NOT_TRIED).change(1, 2, problem=NOT_TRIED)
    found = the_only(group)
    assert found.name == "links-not-tried"
    assert found.status is Status.WARNING
    assert found.what.startswith("node2 did not try to reach the others")
    note = Finding(name="meeting-port-taken", status=Status.NOTE, what="port 29400 is taken")
    noted = replace(group.ends[1], findings=(note,))
    for other in (0, 2):
        group.change(1, other, source=noted).change(other, 1, target=noted)
    assert [one.name for one in judge(group.links)] == ["links-not-tried", "meeting-port-taken"]
    cause = Finding(name="link-down", status=Status.FAILURE, what="node2 is not connected")
    explained = replace(group.ends[1], findings=(cause,))
    for other in (0, 2):
        group.change(1, other, source=explained).change(other, 1, target=explained)
    assert judge(group.links) == [cause]


# ---- links that hurt


def test_a_slow_direction_is_named_as_that() -> None:
    found = the_only(Group(2).figures(0, 1, **SLOW))
    assert found.name == "slow-link"
    assert found.status is Status.WARNING
    assert found.what == "the link from node1 to node2 is slow: 96 Mbit/s"
    assert found.evidence == (
        "node1 to node2: 96 Mbit/s; eth0 of node1 says 10,000 Mbit/s; eth0 of node2 says 10,000 Mbit/s"
    )
    assert "sudo ethtool eth0 | grep -iE 'speed|duplex'" in found.fix


def test_a_slow_link_between_two_is_named_once() -> None:
    assert said(Group(2).both(0, 1, **SLOW)) == [
        "slow-link: the link between node1 and node2 is slow: 96 Mbit/s"
    ]
    assert said(Group(4).both(1, 3, **SLOW)) == [
        "slow-link: the link between node2 and node4 is slow: 96 Mbit/s"
    ]


def test_a_machine_whose_links_are_all_slow_is_named() -> None:
    group = Group(4)
    for place in (0, 1, 3):
        group.both(place, 2, **SLOW)
    assert said(group) == ["slow-link: all links of node3 are slow: 96 Mbit/s"]
    group = Group(4)
    for place in (0, 1, 3):
        group.figures(2, place, **SLOW)
    assert said(group) == ["slow-link: all links from node3 are slow: 96 Mbit/s"]


def test_two_machines_that_are_slow_are_two_findings() -> None:
    group = Group(5)
    for place in (0, 2, 3, 4):
        group.both(place, 1, **SLOW)
    for place in (0, 1, 2, 4):
        group.both(place, 3, **SLOW)
    assert said(group) == [
        "slow-link: all links of node2 are slow: 96 Mbit/s",
        "slow-link: all links of node4 are slow: 96 Mbit/s",
    ]


def test_a_slower_link_among_fast_ones_is_slow_and_among_its_like_it_is_not() -> None:
    gigabit = {"bytes_per_s": 117e6}
    assert said(Group(4).both(0, 1, **gigabit)) == [
        "slow-link: the link between node1 and node2 is slow: 936 Mbit/s"
    ]
    group = Group(3)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        group.both(one, other, **gigabit)
    assert judge(group.links) == []


def test_a_busy_machine_does_not_make_a_link_slow() -> None:
    assert judge(Group(2).both(0, 1, bytes_per_s=60e6, waited_share=0.8).links) == []
    assert judge(Group(3).both(0, 1, bytes_per_s=150e6, waited_share=0.6).links) == []
    # On a slow link it has little to do, and waits in vain.
    assert len(judge(Group(2).both(0, 1, bytes_per_s=12e6, waited_share=0.6).links)) == 1


def test_loss_has_its_direction() -> None:
    found = the_only(Group(2).figures(0, 1, lost=10, retransmits=77, bytes_per_s=5e6))
    assert found.name == "lossy-link"
    assert found.what == "the link from node1 to node2 loses packets: 5 %"
    assert found.evidence == (
        "node1 to node2: 10 of 200 datagrams were lost; TCP sent 77 segments again"
    )
    assert judge(Group(2).figures(0, 1, lost=1).links) == []


def test_a_long_way() -> None:
    found = the_only(Group(2).both(0, 1, round_trips_s=(0.1, 0.11, 0.3), bytes_per_s=1e5))
    assert found.name == "high-latency"
    assert found.what == ("the link between node1 and node2 is a long way: 100 ms there and back")
    assert "100.0 ms at best, 110.0 ms usually" in found.evidence
    # A moment's delay is not the link's.
    assert judge(Group(2).both(0, 1, round_trips_s=(0.0002, 0.4, 0.5)).links) == []


def test_a_longer_way_than_the_others() -> None:
    assert said(Group(4).both(0, 3, round_trips_s=(0.002,))) == [
        "high-latency: the link between node1 and node4 is a long way: 2.0 ms there and back"
    ]


def test_frames_that_vanish() -> None:
    hole = {"stalled": True, "bytes_per_s": None, "frame_bytes": 1500, "frame_tried_bytes": 9000}
    found = the_only(Group(2, mtu_bytes=9000).both(0, 1, **hole))
    assert found.name == "mtu-black-hole"
    assert found.status is Status.FAILURE
    assert found.fix == (
        "on node1:\nsudo ip link set dev eth0 mtu 1500\n"
        "on node2:\nsudo ip link set dev eth0 mtu 1500"
    )
    assert quality.suspects(Group(2).both(0, 1, **hole).links) == []


def test_only_the_end_that_sends_bigger_frames_is_changed() -> None:
    hole = {"stalled": True, "bytes_per_s": None, "frame_bytes": 1400, "frame_tried_bytes": 1500}
    group = Group(2)
    small = replace(group.ends[1], mtu_bytes=1400)
    group.figures(0, 1, **hole).change(0, 1, target=small)
    assert the_only(group).fix == "on node1:\nsudo ip link set dev eth0 mtu 1400"


def test_data_that_stalls_where_datagrams_are_forbidden_is_tried_again_and_told() -> None:
    hole = {"stalled": True, "bytes_per_s": None, "frame_bytes": None, "sent": 0}
    group = Group(2, mtu_bytes=9000).both(0, 1, **hole)
    assert quality.suspects(group.links) == [(0, 1)]
    found = the_only(group)
    assert (found.name, found.status) == ("stalled-link", Status.WARNING)
    assert found.what == "the link between node1 and node2 carries small messages only"
    assert "node1 to node2: no data passed in 1.5 s" in found.evidence
    assert "on node1:\nsudo ethtool -S eth0 | grep" in found.fix
    assert "on node2:\nsudo ip link set dev eth0 mtu 1500" in found.fix


def test_where_no_frame_is_bigger_than_usual_nothing_is_said_of_the_mtu() -> None:
    hole = {"stalled": True, "bytes_per_s": None, "frame_bytes": None, "frame_tried_bytes": None}
    found = the_only(Group(2).both(0, 1, **hole))
    assert found.name == "stalled-link"
    assert "on node1:\nsudo ethtool -S eth0 | grep" in found.fix
    assert "mtu" not in found.fix


def test_big_frames_that_tcp_can_do_without_are_a_note() -> None:
    found = the_only(Group(2).figures(0, 1, frame_bytes=1420))
    assert (found.name, found.status) == ("mtu-differs", Status.NOTE)


def test_changed_data_is_a_failure_before_all_else() -> None:
    found = the_only(Group(2).figures(0, 1, wrong_bytes=3, lost=50, bytes_per_s=1e6))
    assert (found.name, found.status) == ("corrupting-link", Status.FAILURE)
    assert found.what == "the link from node1 to node2 changes data on the way"
    assert found.evidence == "node1 to node2: 3 bytes were wrong"


def test_a_link_that_comes_and_goes() -> None:
    found = the_only(Group(2).change(0, 1, dropped=1, tries=3).change(1, 0, dropped=1, tries=3))
    assert found.name == "flapping-link"
    assert found.what == "the link between node1 and node2 comes and goes"
    assert "node1 to node2: connections were lost in 1 of 3 tries" in found.evidence
    found = the_only(Group(2).change(0, 1, figures=None, tries=3).change(1, 0, tries=3))
    assert found.name == "flapping-link"
    assert found.evidence == "node1 to node2: could not be measured in 3 tries: each took too long"


def test_only_what_may_be_the_moments_fault_is_tried_again() -> None:
    assert quality.suspects(Group(3).both(0, 2, **SLOW).links) == [(0, 2)]
    assert quality.suspects(Group(3).figures(2, 1, lost=10).links) == [(1, 2)]
    assert quality.suspects(Group(3).both(0, 1, round_trips_s=(0.02,)).links) == [(0, 1)]
    assert quality.suspects(Group(3).both(0, 1, round_trips_s=(0.1,)).links) == []
    assert quality.suspects(Group(3).figures(0, 1, frame_bytes=1420).links) == []


# ---- the best of several tries


def test_of_several_tries_the_best_counts() -> None:
    first = replace(GOOD, bytes_per_s=1e6, round_trips_s=(0.5,), lost=20, stalled=True)
    best = first.best_with(GOOD)
    assert best.bytes_per_s == 1.1e9
    assert best.lost == 0
    assert best.round_trip_s == 0.0001
    assert best.median_round_trip_s == statistics.median([0.5, 0.0001, 0.0002, 0.0003])
    assert not best.stalled


def test_wrong_bytes_are_never_forgiven() -> None:
    assert replace(GOOD, wrong_bytes=2).best_with(GOOD).wrong_bytes == 2
    assert GOOD.best_with(replace(GOOD, wrong_bytes=2)).wrong_bytes == 2


@given(st.integers(3, 7), st.data())
def test_whatever_is_blocked_every_blocked_link_is_in_the_evidence_or_its_machine_named(
    count: int, data: st.DataObject
) -> None:
    group = Group(count)
    pairs = [link.places for link in group.links if link.target.place != 0]
    bad = data.draw(st.sets(st.sampled_from(pairs)))
    for source, target in bad:
        group.change(source, target, problem="refused")
    text = "\n".join(f"{one.what}\n{one.fix}" for one in judge(group.links))
    for source, target in bad:
        assert f"node{target + 1}" in text
        assert f"node{source + 1}" in text or "no other machine reaches" in text
    assert bool(bad) == bool(text)
