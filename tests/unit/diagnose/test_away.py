"""Why a machine did not come: what is seen of the way there, and what is said of it."""

import asyncio
import functools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.diagnose import ssh, unreachable_hosts
from torchmuster.diagnose.links.messages import Interface
from torchmuster.diagnose.ssh import (
    Destination,
    Knock,
    SshProblem,
    interface_for,
    knock_on_port,
    ssh_destination,
)
from torchmuster.diagnose.unreachable_hosts import (
    judge_unreachable,
    why_all_unreachable,
    why_unreachable,
)
from torchmuster.finding import Finding, Status

NOBODY = Knock(problem="timeout", seconds=3.6)
OPEN = Knock(problem="", seconds=0.01, greeted=True)


def interface(
    name: str = "eth0", *, up: bool = True, connected: bool = True, network: str = "10.0.0.1/24"
) -> Interface:
    return Interface(
        name=name,
        up=up,
        connected=connected,
        mtu_bytes=1500,
        speed_mbits=None,
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


def judged(knocked: Knock, *, of: str = "host-unreachable", **seen: object) -> Finding:
    known: dict[str, Any] = {"local": "10.0.0.1", "interface": interface(), **seen}
    problem = SshProblem(address="10.0.0.2", port=22, knock=knocked, **known)
    return judge_unreachable("b", trouble(of), problem)


# ---- what is said


def iptables(source: str) -> str:
    return f"sudo iptables -I INPUT {source}-p tcp --dport 22 -j ACCEPT"


def test_a_machine_that_is_on_is_behind_a_firewall_that_drops(snapshot: SnapshotAssertion) -> None:
    found = judged(NOBODY, alive="it answers ping")
    assert (found.name, found.status) == ("ssh-port-dropped", Status.FAILURE)
    assert iptables("-s 10.0.0.1/32 ") in found.fix
    assert "10.0.0.2:22" in found.evidence
    assert found == snapshot


def test_beyond_a_router_nobody_knows_by_which_address_we_are_seen() -> None:
    far = interface(network="192.168.7.1/24")
    found = judged(NOBODY, alive="it answers ping", interface=far, local="192.168.7.1")
    assert iptables("") in found.fix


def test_a_firewall_that_answers_is_told_from_a_machine_that_is_off(
    snapshot: SnapshotAssertion,
) -> None:
    at_once = Knock(problem="prohibited", seconds=0.0)
    assert judged(at_once).name == "ssh-port-prohibited"
    assert judged(at_once) == snapshot
    assert judged(at_once, silent_card=True).name == "host-absent"
    assert judged(at_once, local="").name == "host-unreachable"


@pytest.mark.parametrize(
    ("knocked", "silent_card"), [(Knock(problem="absent", seconds=3.1), False), (NOBODY, True)]
)
def test_where_not_even_the_card_answers_it_is_off(
    knocked: Knock, silent_card: bool, snapshot: SnapshotAssertion
) -> None:
    found = judged(knocked, silent_card=silent_card)
    assert found.name == "host-absent"
    assert "10.0.0.2" in found.what
    assert found.fix.splitlines()[1:] == ["ip -br link", "ip -br address"]
    assert found == snapshot


def test_that_it_is_refused_may_be_a_firewall_too(snapshot: SnapshotAssertion) -> None:
    found = judged(Knock(problem="refused", seconds=0.0), of="ssh-not-served")
    assert found.name == "ssh-not-served"
    assert "\nsudo systemctl enable --now ssh ||" in found.fix
    assert "--dport 22 -j ACCEPT" in found.fix
    assert found == snapshot


def test_ssh_that_hangs_after_the_greeting_gets_smaller_frames(
    snapshot: SnapshotAssertion,
) -> None:
    found = judged(OPEN)
    assert found.name == "ssh-hangs"
    here, there = found.fix.splitlines()[1:]
    assert here == "sudo ip link set dev eth0 mtu 1400"
    assert there == f"ssh -t b {here}"
    assert found == snapshot


def test_a_server_that_never_speaks() -> None:
    found = judged(Knock(problem="", seconds=0.0))
    assert found.name == "ssh-silent"
    assert "\nsudo ss -ltnp 'sport = :22'" in found.fix


@pytest.mark.parametrize("problem", ["timeout", "absent", "no-route"])
def test_the_own_cable_is_looked_at_first(problem: str, snapshot: SnapshotAssertion) -> None:
    found = judged(Knock(problem=problem, seconds=3.1), interface=interface(connected=False))
    assert found.name == "own-cable-out"
    assert "eth0" in found.what
    assert found == snapshot(name="cable")
    off = judged(
        Knock(problem=problem, seconds=3.1), interface=interface(up=False, connected=False)
    )
    assert off.name == "own-interface-down"
    assert off.fix.endswith("ip link set dev eth0 up")
    assert off == snapshot(name="down")


def test_what_stays_unclear_stays_as_it_was_with_what_was_seen() -> None:
    found = judged(NOBODY)
    assert replace(found, evidence="ssh: timed out") == trouble()
    assert found.evidence.splitlines() == ["ssh: timed out", "10.0.0.2:22: timeout after 3.6 s"]
    assert "10.0.0.2:22" in judged(OPEN).evidence


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
        patient = functools.partial(ssh._output, within_s=GIVE_UP_S)
        patch.setattr(ssh, "_output", patient)
        yield


def where(host: str) -> Destination | None:
    return asyncio.run(ssh_destination(host))


def test_ssh_itself_says_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ssh_that_says(tmp_path, "user ana\nhostname 10.0.0.2\nport 2222", monkeypatch):
        assert where("ana@b") == Destination(addresses=("10.0.0.2",), port=2222, renamed=True)
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
    monkeypatch: pytest.MonkeyPatch, way: Destination | None, seen: SshProblem | None = None
) -> None:
    async def told(_: str) -> Destination | None:
        return way

    async def looked(_: Destination) -> SshProblem:
        assert seen is not None, "nobody should have looked"
        return seen

    monkeypatch.setattr(ssh, "ssh_destination", told)
    monkeypatch.setattr(ssh, "find_ssh_problem", looked)


def reason(name: str, host: str = "ana@b") -> Finding:
    return asyncio.run(why_unreachable(host, trouble(name)))


HERE = Destination(addresses=("127.0.1.1",), port=22, renamed=False)


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
    played(monkeypatch, Destination(addresses=("127.0.0.1",), port=2201, renamed=True))
    assert reason("ssh-not-served") == trouble("ssh-not-served")
    played(monkeypatch, HERE)
    assert reason("ssh-key-refused", "ana@localhost") == trouble("ssh-key-refused")


@pytest.mark.parametrize("name", ["ssh-key-refused", "torchmuster-missing", "host-name-unknown"])
def test_what_is_plain_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, Destination(addresses=("192.0.2.1",), port=22, renamed=False))
    assert reason(name) == trouble(name)


@pytest.mark.parametrize("way", [None, Destination(addresses=(), port=22, renamed=False)])
def test_without_an_address_there_is_nothing_to_look_at(
    way: Destination | None, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(ssh, "ssh_destination", told)
    monkeypatch.setattr(unreachable_hosts, "_WITHIN_S", 0.2)
    absent = {1: trouble(), 2: trouble("ssh-failed")}
    assert asyncio.run(why_all_unreachable(absent, ["a", "b", "c"])) == absent
    assert begun == ["b", "c"]


# ---- real sockets


@contextmanager
def serving(greeting: bytes, *, hangs_up: bool = False) -> Iterator[int]:
    """Listen, say something, and stay or hang up."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(greeting)
                if not hangs_up:
                    done.wait(GIVE_UP_S)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join()


def at(port: int) -> Knock:
    return asyncio.run(knock_on_port("127.0.0.1", port))


@pytest.mark.parametrize(
    ("says", "hangs_up", "greeted"),
    [(b"SSH-2.0-x\r\n", False, True), (b"", True, True), (b"", False, False)],
)
def test_whether_a_server_answers(
    says: bytes, hangs_up: bool, greeted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "_GREETED_WITHIN_S", GIVE_UP_S if greeted else 0.1)
    with serving(says, hangs_up=hangs_up) as port:
        found = at(port)
    assert (found.problem, found.greeted) == ("", greeted)


def test_nobody_listens() -> None:
    with socket.socket() as held:  # which keeps others from the port
        held.bind(("127.0.0.1", 0))
        assert at(held.getsockname()[1]).problem == "refused"
