"""Why a machine did not come: what is seen of the way there, and what is said of it."""

import asyncio
import socket
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.diagnose import unreachable_hosts
from torchmuster.diagnose.links.model import Interface
from torchmuster.diagnose.unreachable_hosts import (
    SshPath,
    SshTarget,
    judge_path,
    why_all_unreachable,
    why_unreachable,
)
from torchmuster.finding import Finding, Status


def interface(
    name: str = "eth0", *, up: bool = True, connected: bool = True, network: str = "10.0.0.1/24"
) -> Interface:
    return Interface(
        name=name,
        up=up,
        connected=connected,
        mtu_bytes=1500,
        networks=(network, "fe80::1/64"),
    )


def trouble(name: str = "host-unreachable") -> Finding:
    return Finding(
        name=name,
        status=Status.FAILURE,
        what="cannot connect to host b",
        why="it does not answer",
        fix="ping b",
        evidence="ssh: timed out",
    )


def judged(
    problem: str, seconds: float = 0.0, *, of: str = "host-unreachable", **seen: object
) -> Finding:
    known: dict[str, Any] = {"local": "10.0.0.1", "interface": interface(), **seen}
    path = SshPath(address="10.0.0.2", port=22, problem=problem, seconds=seconds, **known)
    return judge_path("b", trouble(of), path)


# ---- what is said


def iptables(source: str) -> str:
    return f"sudo iptables -I INPUT {source}-p tcp --dport 22 -j ACCEPT"


def test_a_machine_that_is_on_is_behind_a_firewall_that_drops(snapshot: SnapshotAssertion) -> None:
    found = judged("timeout", 3.6, alive="it answers ping")
    assert (found.name, found.status) == ("ssh-port-dropped", Status.FAILURE)
    assert iptables("-s 10.0.0.1/32 ") in found.fix
    assert "10.0.0.2:22" in found.evidence
    assert found == snapshot


def test_a_firewall_that_answers_is_told_from_a_machine_that_is_off(
    snapshot: SnapshotAssertion,
) -> None:
    assert judged("prohibited").name == "ssh-port-prohibited"
    assert judged("prohibited") == snapshot
    assert judged("prohibited", silent_card=True).name == "host-absent"
    assert judged("prohibited", local="").name == "host-unreachable"


@pytest.mark.parametrize(("problem", "silent_card"), [("absent", False), ("timeout", True)])
def test_where_not_even_the_card_answers_it_is_off(
    problem: str, silent_card: bool, snapshot: SnapshotAssertion
) -> None:
    found = judged(problem, 3.6, silent_card=silent_card)
    assert found.name == "host-absent"
    assert "10.0.0.2" in found.what
    assert found.fix.splitlines()[1:] == ["ip -br link", "ip -br address"]
    assert found == snapshot


def test_ssh_that_hangs_after_the_greeting_gets_smaller_frames(
    snapshot: SnapshotAssertion,
) -> None:
    found = judged("", 0.01)
    assert found.name == "ssh-hangs"
    here, there = found.fix.splitlines()[1:]
    assert here == "sudo ip link set dev eth0 mtu 1400"
    assert there == f"ssh -t b {here}"
    assert found == snapshot


@pytest.mark.parametrize("problem", ["timeout", "absent", "no-route"])
def test_the_own_cable_is_looked_at_first(problem: str, snapshot: SnapshotAssertion) -> None:
    found = judged(problem, 3.1, interface=interface(connected=False))
    assert found.name == "own-cable-out"
    assert "eth0" in found.what
    assert found == snapshot(name="cable")
    off = judged(problem, 3.1, interface=interface(up=False, connected=False))
    assert off.name == "own-interface-down"
    assert off.fix.endswith("ip link set dev eth0 up")
    assert off == snapshot(name="down")


# ---- which interface leads there


# ---- where ssh goes


# ---- the whole


def played(
    monkeypatch: pytest.MonkeyPatch, way: SshTarget | None, seen: SshPath | None = None
) -> None:
    async def told(_: str) -> SshTarget | None:
        return way

    async def looked(_: SshTarget) -> SshPath:
        assert seen is not None, "nobody should have looked"
        return seen

    monkeypatch.setattr(unreachable_hosts, "ssh_target", told)
    monkeypatch.setattr(unreachable_hosts, "examine_path", looked)


def reason(name: str, host: str = "ana@b") -> Finding:
    return asyncio.run(why_unreachable(host, trouble(name)))


HERE = SshTarget(addresses=("127.0.1.1",), port=22, renamed=False)


@pytest.mark.parametrize("name", ["ssh-host-key-unknown", "ssh-key-refused", "ssh-not-served"])
def test_a_name_that_leads_to_this_machine(
    name: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    played(monkeypatch, HERE)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    found = reason(name)
    assert found.name == "name-leads-here"
    assert "127.0.1.1" in found.what
    assert "\ngetent hosts b\n" in found.fix
    assert found == snapshot


def test_all_are_looked_for_at_once_and_a_look_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = asyncio.Event()
    begun: list[str] = []

    async def told(host: str) -> None:
        begun.append(host)
        if len(begun) == 2:
            both.set()
        await both.wait()
        if host == "c":
            await asyncio.Event().wait()

    monkeypatch.setattr(unreachable_hosts, "ssh_target", told)
    monkeypatch.setattr(unreachable_hosts, "_WITHIN_S", 0.2)
    absent = {1: trouble(), 2: trouble("ssh-failed")}
    assert asyncio.run(why_all_unreachable(absent, ["a", "b", "c"])) == absent
    assert begun == ["b", "c"]


# ---- real sockets
