"""Faults between real hosts: each is named, with its direction, and what mends it does mend it."""

import re
import shlex
from collections.abc import Sequence

import pytest

from hosts.conftest import MakeLab
from hosts.examining import found_in, surveyed
from hosts.faults import (
    DeadInterface,
    DockerBridge,
    Fault,
    KeptApart,
    LinkCut,
    OnlyOpenPorts,
    SecondNetwork,
    Verdict,
    injected,
)
from hosts.host import Host
from hosts.lab import Lab
from nightly import nightly_except
from torchmuster.diagnose.links.judge import judge_links
from torchmuster.finding import Finding, Status

WORDS = {"drop": "dropped", "refuse": "refused", "prohibit": "prohibited"}
NAMES = {
    "drop": "blocked-dropped",
    "refuse": "blocked-rejected",
    "prohibit": "blocked-prohibited",
}
VERDICTS: list[Verdict] = ["drop", "refuse", "prohibit"]


def bad(findings: Sequence[Finding]) -> list[str]:
    return [f"{one.name}: {one.what}" for one in findings if one.status is not Status.NOTE]


def the_only(findings: Sequence[Finding]) -> Finding:
    assert len(bad(findings)) == 1, findings
    return findings[0]


def machines(found: Finding) -> list[str]:
    """Return the machines that a finding names, who calls before who is called."""
    return re.findall(r"node\d+", found.what)


def run_fix(host: Host, finding: Finding, word: str) -> None:
    """Do on a host what the fix says there; of several firewalls' lines that of iptables."""
    lines = [line for line in finding.fix.splitlines() if word in line]
    assert lines, finding.fix
    for line in lines:
        command = shlex.split(line.partition("  #")[0])
        assert command.pop(0) == "sudo"
        host.run(command, check=True)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_healthy_hosts_give_no_finding_and_all_figures(make_lab: MakeLab, count: int) -> None:
    links = surveyed(make_lab(count, ssh=False))
    assert judge_links(links) == []
    assert len(links) == count * (count - 1)
    for link in links:
        assert link.problem == ""
        assert link.rendezvous_problem == ("" if link.target.name == "node1" else None)
        assert link.address is not None
        assert link.address.address == f"10.77.0.{11 + link.target.place}"
    measured = [link.speed for link in links if link.speed is not None]
    assert len(measured) == 2 * (count if count > 2 else 1)  # a ring
    for speed in measured:
        assert (speed.bytes_per_s or 0) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault", [DockerBridge(), SecondNetwork(), DeadInterface()], ids=lambda one: type(one).__name__
)
def test_further_interfaces_are_no_fault(make_lab: MakeLab, fault: Fault) -> None:
    lab = make_lab(2, ssh=False)
    with injected(lab, fault):
        links = surveyed(lab)
    assert bad(judge_links(links)) == []
    assert {link.address and link.address.address for link in links} <= {
        "10.77.0.11",
        "10.77.0.12",
        "10.88.0.11",
        "10.88.0.12",
    }


@pytest.mark.parametrize("verdict", nightly_except(["refuse"], {name: name for name in VERDICTS}))
def test_one_direction_is_blocked(make_lab: MakeLab, verdict: Verdict) -> None:
    lab = make_lab(2, ssh=False)
    with injected(lab, OnlyOpenPorts(host="node2", ports=(2222,), verdict=verdict)):
        found = the_only(found_in(lab))
        assert found.name == NAMES[verdict]
        assert machines(found) == ["node1", "node2"]
        assert " 10.77.0.12: " in found.what
        assert WORDS[verdict] in found.what
        run_fix(lab.hosts[1], found, "iptables")
        assert bad(found_in(lab)) == []


def test_a_cable_that_is_out(make_lab: MakeLab) -> None:
    lab = make_lab(3, ssh=False)
    with injected(lab, LinkCut(host="node2")):
        found = the_only(found_in(lab))
        assert found.name == "host-absent"
        assert set(machines(found)) == {"node2"}
    assert bad(found_in(lab)) == []


@pytest.mark.nightly
def test_the_other_network_is_taken_where_one_is_cut(make_lab: MakeLab) -> None:
    lab = make_lab(2, ssh=False)
    with injected(lab, SecondNetwork(), LinkCut(host="node2")):
        links = surveyed(lab)
    assert {link.address and link.address.address for link in links} == {"10.88.0.11", "10.88.0.12"}
    assert judge_links(links) == []


@pytest.mark.nightly
def test_two_hosts_with_the_same_address(make_lab: MakeLab) -> None:
    lab = make_lab(2, ssh=False)
    lab.hosts[1].ip("addr", "flush", "dev", "eth0")
    lab.hosts[1].ip("addr", "add", "10.77.0.11/24", "dev", "eth0")
    found = the_only(found_in(lab))
    assert found.name == "wrong-machine-answers"
    assert "10.77.0.11" in found.what
    assert "another host answers" in found.what


def test_nothing_listens_after_a_survey(make_lab: MakeLab) -> None:
    lab: Lab = make_lab(2, ssh=False)
    surveyed(lab)
    for host in lab.hosts:
        assert [line for line in host.run(["ss", "-Hltun"]).stdout.splitlines() if line] == []
        assert host.pids() == []


@pytest.mark.nightly
def test_of_twelve_hosts_the_one_cut_off_and_the_two_kept_apart_are_named(
    make_lab: MakeLab,
) -> None:
    lab = make_lab(12, ssh=False)
    # Five apart: in a group of this size their link is not measured.
    kept_apart = KeptApart(host="node3", other="node8")
    with injected(lab, LinkCut(host="node6"), kept_apart):
        findings = found_in(lab)
    assert {one.name: machines(one) for one in findings if one.status is not Status.NOTE} == {
        "blocked-dropped": ["node3", "node8"],
        "host-absent": ["node6"],
    }
