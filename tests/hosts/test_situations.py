"""``muster run --hosts`` works in every situation that real networks have in store.

Each situation is data: the faults, the hosts, the flags, and what the run says about it. What is asserted
is always the same: every rank's lines are there, on the host it belongs to, the run ends well, and
nothing is left on any host.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hosts.conftest import MakeLab
from hosts.faults import (
    ClockSkew,
    DeadInterface,
    Delay,
    DockerBridge,
    Fault,
    Loss,
    NoSshd,
    PortTaken,
    SecondNetwork,
    Undo,
    injected,
    own_name_is_loopback,
    own_name_is_unknown,
)
from hosts.lab import Lab
from hosts.launching import (
    PATIENT,
    SMOKE,
    Transcript,
    leftovers,
    muster_run,
    strays,
)
from hosts.namespaces import await_true
from nightly import nightly_except

_OUR_LINE = re.compile(r"\[rank (\d+)\] ((?:world_size|gathered|barrier).*)")


@dataclass(frozen=True, kw_only=True)
class Ipv6Network:
    """Not a fault: a second network that has IPv6 only, nodeK is fd00:77::1K on eth1."""

    def apply(self, lab: Lab) -> Undo:
        lab.add_bridge("br1")
        for host in lab.hosts:
            lab.plug(host, "eth1", port=f"q{host.number}", bridge="br1")
            address = f"fd00:77::{10 + host.number}/64"
            host.ip("-6", "addr", "add", address, "dev", "eth1", "nodad")

        def undo() -> None:
            for host in lab.hosts:
                host.ip("link", "del", "eth1")
            lab.switch_ip("link", "del", "br1")

        return undo


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is wrong, what is typed, and what the launcher says about it."""

    name: str
    faults: Sequence[Fault] = ()
    hosts: str = "node1,node2"
    flags: Sequence[str] = ()
    says: str = ""


SITUATIONS = [
    Situation(
        name="own names are unknown, and no ssh server here",
        faults=[
            own_name_is_unknown("node1"),
            own_name_is_unknown("node2"),
            NoSshd(host="node1"),
        ],
        says="rendezvous at 10.77.0.11 (eth0 of node1): reached by node2",
    ),
    Situation(
        name="docker0 has one address on all hosts",
        faults=[DockerBridge()],
        says="rendezvous at 10.77.0.11 (eth0 of node1): reached by node2",
    ),
    Situation(
        name="the second network, by address",
        faults=[SecondNetwork()],
        flags=["--set", "launch.address=10.88.0.11"],
        says="rendezvous at 10.88.0.11 (eth1 of node1): reached by node2",
    ),
    Situation(
        name="a network that has IPv6 only",
        faults=[Ipv6Network()],
        hosts="node1:2,node2",
        flags=["--set", "launch.address=fd00:77::11"],
        says="rendezvous at fd00:77::11 (eth1 of node1): reached by node2",
    ),
    Situation(
        name="the usual port is taken",
        faults=[PortTaken(host="node1", port=29400)],
        says="port 29401: the next free one, because 29400 is used by",
    ),
    Situation(name="packets are lost", faults=[Loss(percent=5)]),
    Situation(name="a long way", faults=[Delay(host="node2", round_trip_ms=100)]),
    Situation(
        name="hosts by address",
        hosts="10.77.0.12,10.77.0.11",
        says="2 ranks started: 10.77.0.12 1, 10.77.0.11 1",
    ),
    Situation(
        name="everything at once",
        faults=[
            own_name_is_loopback("node1"),
            own_name_is_loopback("node3"),
            own_name_is_unknown("node2"),
            DockerBridge(),
            DeadInterface(),
            PortTaken(host="node3", port=29400),
            ClockSkew(host="node2", seconds=-60),
            Loss(percent=2),
        ],
        hosts="node3,node1,node2,node4",
        says="rendezvous at 10.77.0.13 (eth0 of node3): reached by node1, node2 and node4",
    ),
]


@pytest.mark.parametrize(
    "situation",
    nightly_except(
        ["a network that has IPv6 only"],
        {situation.name: situation for situation in SITUATIONS},
    ),
)
def test_a_run_works_in(situation: Situation, make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(max(map(_number, situation.hosts.split(","))))
    with injected(lab, *situation.faults):
        said = _run(lab, ["--hosts", situation.hosts, *situation.flags], tmp_path)
        assert _ranks(said) == _expected(situation.hosts)
        assert situation.says in _flat(said.text("err"))
        _assert_nothing_left(lab)


def _flags(flags: Sequence[str]) -> list[str]:
    return [*flags, "--device", "cpu", *PATIENT]


def _run(lab: Lab, flags: Sequence[str], folder: Path) -> Transcript:
    said = Transcript(muster_run(lab.hosts[0], [*_flags(flags), *SMOKE], folder))
    assert said.end() == 0, said.text()
    return said


def _ranks(said: Transcript) -> dict[int, list[str]]:
    """Return what each rank said, in its order."""
    found: dict[int, list[str]] = {}
    for line in said.lines:
        if line.stream == "out" and (match := _OUR_LINE.fullmatch(line.text)):
            found.setdefault(int(match[1]), []).append(match[2])
    return dict(sorted(found.items()))


def _expected(hosts: str, *, each: int = 1) -> dict[int, list[str]]:
    names = []
    for word in hosts.split(","):
        _, _, count = word.partition(":")
        names += [f"node{_number(word)}"] * (int(count) if count else each)
    return {
        rank: [
            f"world_size={len(names)} device=cpu hostname={name}",
            f"gathered={list(range(len(names)))}",
            "barrier OK; shutting down",
        ]
        for rank, name in enumerate(names)
    }


def _number(word: str) -> int:
    """Return the number of a host in ``node2:4`` or ``10.77.0.12``."""
    name = word.partition(":")[0]
    return int(name[-1])


def _flat(text: str) -> str:
    """Take the line breaks out of findings."""
    return re.sub(r"\s+", " ", text)


def _assert_nothing_left(lab: Lab) -> None:
    assert leftovers(lab) == {}
    await_true("the node agents have gone", lambda: strays(lab) == {})
