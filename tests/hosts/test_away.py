"""Machines that did not come, beyond the catalogue: what is seen from this machine without ssh."""

import json
import sys

import pytest

from hosts.checking import check, do_what_it_says
from hosts.faults import (
    ClosedPorts,
    HostKilled,
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
