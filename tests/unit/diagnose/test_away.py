"""Why a machine did not come: what is seen of the way there, and what is said of it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.diagnose import unreachable_hosts
from torchmuster.diagnose.links.model import Interface
from torchmuster.diagnose.unreachable_hosts import (
    SshPath,
    SshTarget,
    interface_for,
    judge_path,
    ssh_target,
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


def test_beyond_a_router_nobody_knows_by_which_address_we_are_seen() -> None:
    far = interface(network="192.168.7.1/24")
    found = judged("timeout", 3.6, alive="it answers ping", interface=far, local="192.168.7.1")
    assert iptables("") in found.fix


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


def test_that_it_is_refused_may_be_a_firewall_too(snapshot: SnapshotAssertion) -> None:
    found = judged("refused", 0.0, of="ssh-not-served")
    assert found.name == "ssh-not-served"
    assert "\nsudo systemctl enable --now ssh ||" in found.fix
    assert "--dport 22 -j ACCEPT" in found.fix
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


def test_what_stays_unclear_stays_as_it_was_with_what_was_seen() -> None:
    found = judged("timeout", 3.6)
    assert replace(found, evidence="ssh: timed out") == trouble()
    assert found.evidence.splitlines() == ["ssh: timed out", "10.0.0.2:22: timeout after 3.6 s"]
    assert "10.0.0.2:22" in judged("", 0.01).evidence


# ---- which interface leads there


def test_an_interface_of_the_same_network_counts_before_the_one_that_is_used() -> None:
    dead = interface(connected=False)
    wifi = interface("wlan0", network="192.168.7.1/24")
    assert interface_for("10.0.0.2", "192.168.7.1", [wifi, dead]) == dead
    assert interface_for("10.9.9.9", "192.168.7.1", [wifi, dead]) == wifi
    second = interface("eth1", network="10.0.0.5/24")
    assert interface_for("10.0.0.2", "10.0.0.5", [dead, second]) == second
    assert interface_for("10.9.9.9", "", [dead]) is None


# ---- where ssh goes


@contextmanager
def ssh_that_says(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "-G --" ] || exit 1\ncat <<END\n{text}\nEND\n')
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=":")
        patch.setattr(unreachable_hosts, "_PROGRAM_WITHIN_S", GIVE_UP_S)
        yield


def where(host: str) -> SshTarget | None:
    return asyncio.run(ssh_target(host))


def test_ssh_itself_says_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ssh_that_says(tmp_path, "user ana\nhostname 10.0.0.2\nport 2222", monkeypatch):
        assert where("ana@b") == SshTarget(addresses=("10.0.0.2",), port=2222, renamed=True)
        written = where("ana@10.0.0.2")
    assert written is not None
    assert not written.renamed


@pytest.mark.parametrize(
    "text", ["hostname 10.0.0.2\nport 22\nproxyjump gate", "hostname b", "port 22", "", "hostname"]
)
def test_a_way_through_another_machine_is_not_looked_at(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ssh_that_says(tmp_path, text, monkeypatch):
        assert where("b") is None


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


def test_a_tunnel_and_what_was_written_on_purpose_are_no_mistakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played(monkeypatch, SshTarget(addresses=("127.0.0.1",), port=2201, renamed=True))
    assert reason("ssh-not-served") == trouble("ssh-not-served")
    played(monkeypatch, HERE)
    assert reason("ssh-key-refused", "ana@localhost") == trouble("ssh-key-refused")


@pytest.mark.parametrize("name", ["ssh-key-refused", "torchmuster-missing", "host-name-unknown"])
def test_what_is_plain_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, SshTarget(addresses=("192.0.2.1",), port=22, renamed=False))
    assert reason(name) == trouble(name)


@pytest.mark.parametrize("way", [None, SshTarget(addresses=(), port=22, renamed=False)])
def test_without_an_address_there_is_nothing_to_look_at(
    way: SshTarget | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, way)
    assert reason("host-unreachable") == trouble()


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


def test_a_port_that_listens_and_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert asyncio.run(unreachable_hosts._connect("127.0.0.1", port))[0] == ""
    with socket.socket() as held:  # which keeps others from the port
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert asyncio.run(unreachable_hosts._connect("127.0.0.1", port))[0] == "refused"
