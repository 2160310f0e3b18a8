"""Machines that did not come, beyond the catalogue: what is seen from this machine without ssh."""

import json
import sys
from collections.abc import Callable

import pytest

from hosts.checking import check, do_what_it_says
from hosts.faults import (
    ClosedPorts,
    HostKilled,
    KeyRefused,
    LinkCut,
    Mtu,
    injected,
)
from hosts.lab import Lab

# As the course of a check asks; an own one would take as long as ssh does, each time.
_ASK = """
import asyncio, json, sys
from torchmuster.finding import Finding, Status
from torchmuster.diagnose.unreachable_hosts import why_all_unreachable
name, *hosts = sys.argv[1:]
trouble = Finding(name=name, status=Status.FAILURE, what="cannot connect", evidence="timed out")
found = asyncio.run(why_all_unreachable(dict.fromkeys(range(len(hosts)), trouble), hosts))
print(json.dumps([one.as_json() for one in found.values()]))
"""


def ask(lab: Lab, *hosts: str, trouble: str = "host-unreachable") -> list[dict[str, str]]:
    done = lab.hosts[0].run([sys.executable, "-c", _ASK, trouble, *hosts], check=True)
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def test_several_that_are_away_are_told_apart_at_once(lab3: Lab) -> None:
    with injected(lab3, ClosedPorts(host="node2", ports=(2222,)), HostKilled(host="node3")):
        dropped, absent = ask(lab3, "node2", "node3")
    assert dropped["name"] == "ssh-port-dropped"
    assert absent["name"] == "host-absent"
    assert "10.77.0.13" in absent["what"]


@pytest.mark.nightly
def test_a_machine_that_drops_everything_is_known_by_its_network_card(lab2: Lab) -> None:
    node2 = lab2.host("node2")
    node2.iptables("-A", "INPUT", "!", "-i", "lo", "-j", "DROP")
    (found,) = ask(lab2, "node2")
    assert found["name"] == "ssh-port-dropped"
    assert "network adapter" in found["what"]
    do_what_it_says(node2, found["fix"], "iptables")
    again = check(lab2, "--quick")
    assert again.named("ssh-port-dropped") == []


@pytest.mark.nightly
def test_the_own_interface_is_switched_off_and_on_again_by_the_fix(lab2: Lab) -> None:
    node1 = lab2.host("node1")
    node1.ip("link", "set", "eth0", "down")
    (found,) = ask(lab2, "node2", trouble="network-unreachable")
    assert found["name"] == "own-interface-down"
    assert "eth0" in found["what"]
    assert "(10.77.0.11/24)" in found["what"]
    do_what_it_says(node1, found["fix"], "ip link")
    assert check(lab2, "--quick").exit_code == 0


@pytest.mark.nightly
def test_one_cable_is_one_finding_for_all_that_are_away(lab3: Lab) -> None:
    with injected(lab3, LinkCut(host="node1")):
        found = check(lab3, "--quick")
    (only,) = found.above_note()
    assert only["name"] == "own-cable-out"


@pytest.mark.nightly
def test_a_tunnel_between_them_carries_smaller_frames(lab2: Lab) -> None:
    with injected(lab2, Mtu(host_bytes=1500, switch_bytes=1420)):
        (found,) = ask(lab2, "node2")
        assert found["name"] == "ssh-hangs"
        do_what_it_says(lab2.host("node1"), found["fix"], "mtu 1400")
        assert check(lab2, "--quick").named("stalled-link") == []


@pytest.mark.nightly
@pytest.mark.parametrize("big", [9000, 1500])
def test_no_alarm_where_all_is_well(big: int, lab2: Lab) -> None:
    # One machine sends bigger frames than the other: TCP agrees on what both can.
    with injected(lab2, Mtu(host="node1", host_bytes=big)):
        (found,) = ask(lab2, "node2")
    assert found["name"] == "ssh-hangs"  # what ssh said, with an answer from the server
    assert "10.77.0.12:2222: connected" in found["evidence"]


def _refused_key(lab: Lab) -> list[dict[str, str]]:
    with injected(lab, KeyRefused(host="node2")):
        return ask(lab, "node2", trouble="ssh-key-refused")


def _unknown_name(lab: Lab) -> list[dict[str, str]]:
    return ask(lab, "node9")


@pytest.mark.nightly
@pytest.mark.parametrize("away", [_refused_key, _unknown_name])
def test_what_ssh_says_plainly_stays(
    away: Callable[[Lab], list[dict[str, str]]], lab2: Lab
) -> None:
    (found,) = away(lab2)
    assert found["name"] in ("ssh-key-refused", "host-unreachable")
    assert found["evidence"] == "timed out"
