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
    OnlyOpenPorts,
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
    SMOKE_WHEN_TOLD,
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
        name="own names lead to 127.0.1.1",
        faults=[own_name_is_loopback("node1"), own_name_is_loopback("node2")],
        says="rendezvous at 10.77.0.11 (eth0 of node1): reached by node2",
    ),
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
        name="an interface that leads nowhere",
        faults=[DeadInterface()],
        says="rendezvous at 10.77.0.11 (eth0 of node1): reached by node2",
    ),
    Situation(
        name="the second network, by address",
        faults=[SecondNetwork()],
        flags=["--set", "launch.address=10.88.0.11"],
        says="rendezvous at 10.88.0.11 (eth1 of node1): reached by node2",
    ),
    Situation(
        name="the second network, by interface",
        faults=[SecondNetwork()],
        flags=["--set", "launch.address=eth1"],
        says="rendezvous at 10.88.0.11 (eth1 of node1): reached by node2",
    ),
    Situation(
        name="a network that has IPv6 only",
        faults=[Ipv6Network()],
        flags=["--set", "launch.address=eth1"],
        says="rendezvous at fd00:77::11 (eth1 of node1): reached by node2",
    ),
    Situation(
        name="clocks a minute apart",
        faults=[ClockSkew(host="node2", seconds=60), ClockSkew(host="node3", seconds=-60)],
        hosts="node1,node2,node3",
        says="clocks differ from the clock of node1: node2 is",
    ),
    Situation(
        name="clocks an hour apart",
        faults=[ClockSkew(host="node2", seconds=-3600), ClockSkew(host="node3", seconds=3600)],
        hosts="node1,node2,node3",
        says="clocks differ from the clock of node1: node2 is",
    ),
    Situation(
        name="the usual port is taken",
        faults=[PortTaken(host="node1", port=29400)],
        says="port 29401: the next free one, because 29400 is used by",
    ),
    # With gloo the host with the greater address makes the connection.
    Situation(
        name="a firewall that lets nobody in at one host",
        faults=[OnlyOpenPorts(host="node2", ports=(2222,))],
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
    Situation(
        name="c10d, own names lead to 127.0.1.1",
        faults=[own_name_is_loopback("node1"), own_name_is_loopback("node2")],
        flags=["--rdzv-backend", "c10d"],
    ),
    # By itself c10d would number the hosts by their addresses.
    Situation(
        name="c10d in another order than that of the addresses",
        hosts="node3,node1:2,node2",
        flags=["--rdzv-backend", "c10d"],
    ),
    Situation(
        name="c10d with clocks a minute apart",
        faults=[ClockSkew(host="node2", seconds=-60)],
        flags=["--rdzv-backend", "c10d"],
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hosts", "flags"),
    [
        ("node1,node2", ["--ranks", "2"]),
        ("node1,node2:2", []),
        ("node1:2,node2,node3", []),
        ("node3,node1,node2", []),
        ("node4,node2,node3,node1", []),
    ],
)
def test_ranks_are_counted_in_the_written_order(
    hosts: str, flags: list[str], make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(max(map(_number, hosts.split(","))))
    said = _run(lab, ["--hosts", hosts, *flags], tmp_path)
    each = int(flags[1]) if flags else 1
    assert _ranks(said) == _expected(hosts, each=each)
    world_size = len(_ranks(said))
    assert f"muster: {world_size} ranks started: " in said.text("err")
    _assert_nothing_left(lab)


@pytest.mark.nightly
def test_two_jobs_on_the_same_hosts_do_not_disturb_each_other(lab2: Lab, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(SMOKE_WHEN_TOLD)
    jobs = [
        Transcript(muster_run(lab2.hosts[0], [*_flags(["--hosts", hosts]), "train.py"], folder))
        for folder, hosts in zip(folders, ("node1,node2", "node1:2,node2"), strict=True)
    ]
    for job in jobs:
        job.wait_for("ranks started")
    for folder in folders:  # not before both are there
        (folder / "go").touch()
    assert [job.end() for job in jobs] == [0, 0], [job.text() for job in jobs]
    assert _ranks(jobs[0]) == _expected("node1,node2")
    assert _ranks(jobs[1]) == _expected("node1:2,node2")
    ports = {port for job in jobs for port in re.findall(r"port (\d+):", job.text("err"))}
    assert ports == {"29400", "29401"}
    _assert_nothing_left(lab2)


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
