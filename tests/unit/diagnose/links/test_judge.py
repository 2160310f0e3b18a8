"""What is found about links, of groups that do not exist: the fault, the direction, whom to blame."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from torchmuster.diagnose.links.judge import faults_of, judge_links
from torchmuster.finding import Finding, Status
from unit.diagnose.links.made_up import GOOD, Group

SLOW = {"bytes_per_s": 12e6}
Fault = Callable[[Group], object]


def named(finding: Finding) -> set[str]:
    """The machines that a finding names."""
    return set(re.findall(r"node\d+", finding.what))


def the_only(group: Group) -> Finding:
    (found,) = judge_links(group.links)
    return found


@pytest.mark.parametrize("count", [2, 3, 9])
def test_good_links_are_not_worth_a_word(count: int) -> None:
    assert judge_links(Group(count).links) == []
    assert faults_of(Group(count).links) == {}


def _into(target: int, count: int, **changed: str) -> Fault:
    def apply(group: Group) -> None:
        for place in range(count):
            if place != target:
                group.change(place, target, **changed)

    return apply


def _between(first: int, second: int, there: str, back: str) -> Fault:
    return lambda group: group.change(first, second, problem=there).change(
        second, first, problem=back, **({"rendezvous_problem": back} if first == 0 else {})
    )


def _slow_links_of(end: int, count: int) -> Fault:
    def apply(group: Group) -> None:
        for place in range(count):
            if place != end:
                group.speed(place, end, **SLOW)

    return apply


@pytest.mark.parametrize(
    ("count", "fault", "name", "hosts", "in_fix"),
    [
        (2, lambda g: g.change(0, 1, problem="timeout"), "blocked-dropped", {1, 2}, "32768"),
        (2, lambda g: g.change(0, 1, problem="refused"), "blocked-rejected", {1, 2}, "10.0.0.1/32"),
        (2, lambda g: g.change(0, 1, problem="prohibited"), "blocked-prohibited", {1, 2}, "ufw"),
        (2, lambda g: g.change(0, 1, problem="absent"), "host-absent", {1, 2}, "ip link set"),
        (2, lambda g: g.change(0, 1, problem="no-route"), "no-route", {1, 2}, "ip route get"),
        (
            2,
            lambda g: g.change(0, 1, problem="impostor"),
            "wrong-machine-answers",
            {1, 2},
            "ip -br",
        ),
        (
            2,
            lambda g: g.change(1, 0, rendezvous_problem="refused"),
            "rendezvous-port-blocked",
            {1, 2},
            "--dport 29400 ",
        ),
        (
            2,
            lambda g: g.change(1, 0, problem="timeout"),
            "data-ports-blocked",
            {1, 2},
            "--dport 32768:60999 ",
        ),
        (4, _into(0, 4, rendezvous_problem="timeout"), "rendezvous-port-blocked", {1}, "29400"),
        (4, _into(2, 4, problem="prohibited"), "blocked-prohibited", {3}, "on node3:"),
        # The other direction only follows from the broken path.
        (3, _between(1, 2, "no-route", "timeout"), "no-route", {2, 3}, "ip route get 10.0.0.3"),
        (2, _between(0, 1, "timeout", "absent"), "host-absent", {1, 2}, "ip link set"),
        # Silence in both directions may be two firewalls, or a broken path.
        (2, _between(0, 1, "timeout", "timeout"), "blocked-dropped", {1, 2}, "ip -br link"),
        (4, lambda g: g.speed(1, 3, **SLOW), "slow-link", {2, 4}, "ethtool eth0"),
        (4, _slow_links_of(2, 4), "slow-link", {3}, "ethtool eth0"),
        (2, lambda g: g.speed(0, 1, bytes_per_s=None), "stalled-link", {1, 2}, "mtu 1500"),
        (
            2,
            lambda g: g.speed(0, 1, wrong_bytes=3, **SLOW),
            "corrupting-link",
            {1, 2},
            "ethtool -S",
        ),
    ],
)
def test_each_fault_is_one_finding_that_names_the_hosts(
    count: int, fault: Fault, name: str, hosts: set[int], in_fix: str
) -> None:
    group = Group(count)
    fault(group)
    found = the_only(group)
    assert (found.name, named(found)) == (name, {f"node{number}" for number in hosts})
    assert found.status is (Status.WARNING if name == "slow-link" else Status.FAILURE)
    assert in_fix in found.fix
    assert found.why
    assert found.evidence


def test_a_firewall_is_opened_for_the_caller_alone_at_the_ports_that_are_needed() -> None:
    found = the_only(Group(2, ephemeral_ports=(50000, 50100)).change(0, 1, problem="timeout"))
    _, ufw, firewalld, iptables = found.fix.splitlines()
    assert all("10.0.0.1/32" in command for command in (ufw, firewalld, iptables))
    assert "50000:50100" in ufw
    assert "50000-50100" in firewalld
    assert "--dport 50000:50100 -j ACCEPT" in iptables


def test_many_callers_are_allowed_by_their_network() -> None:
    group = Group(12)
    _into(2, 12, problem="timeout")(group)
    assert "from 10.0.0.0/28 to" in the_only(group).fix


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
    text = "\n".join(f"{one.what}\n{one.fix}" for one in judge_links(group.links))
    for source, target in bad:
        assert f"node{target + 1}" in text
        everybody = {(other, target) for other in range(count) if other != target}
        assert f"node{source + 1}" in text or everybody <= bad or count > 5
    assert bool(bad) == bool(text)
