"""Names: the own one, localhost, and name servers that do not answer."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import found, made_up_machine, only
from patience import GIVE_UP_S
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import names
from torchmuster.finding import Status
from torchmuster.launch.network.interfaces import Interface

OWN, REVERSE = names.CHECKS
LOOPBACK = Interface(name="lo", up=True, addresses=("127.0.0.1", "::1"))
ETHERNET = Interface(name="eth0", up=True, addresses=("10.0.0.5", "fd00::5"))
HOSTS = "10.0.0.5 node1"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.setattr(
        "torchmuster.launch.network.interfaces.read_interfaces", lambda: (LOOPBACK, ETHERNET)
    )
    monkeypatch.setattr(names, "_GIVEN_UP_S", GIVE_UP_S)
    files = {
        "proc/sys/kernel/hostname": "node1\n",
        "etc/resolv.conf": "search lan\nnameserver 10.0.0.53\n",
    }
    return made_up_machine(tmp_path, files)


@pytest.fixture
def silence() -> Iterator[Callable[[str], Sequence[str]]]:
    """A name server that does not answer while the test runs."""
    over = threading.Event()

    def look_up(_: str) -> Sequence[str]:
        over.wait(GIVE_UP_S)
        return []

    yield look_up
    over.set()
    for thread in threading.enumerate():
        if thread.name == "lookup":
            thread.join(GIVE_UP_S)


def know(monkeypatch: pytest.MonkeyPatch, **known: Sequence[str]) -> None:
    names_known = {"localhost": ["127.0.0.1"], **known}
    monkeypatch.setattr(
        "torchmuster.launch.network.interfaces.resolve_host", lambda name: names_known.get(name, [])
    )


def test_a_name_that_is_loopback_is_a_note(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    know(monkeypatch, node1=["127.0.1.1"])
    finding = only(OWN, machine)
    assert (finding.name, finding.status) == ("name-is-loopback", Status.NOTE)
    assert "127.0.1.1" in finding.what
    assert finding == snapshot
    assert finding.fix.splitlines()[-1] == f"echo '{HOSTS}' | sudo tee -a /etc/hosts"


def test_what_rewrites_the_hosts_file_keeps_the_old_one(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    know(monkeypatch, node1=["127.0.2.1"])
    hosts = "127.0.0.1 localhost\n# node1 was here\n127.0.2.1\tnode1.lan node1  # ours\n"
    made_up_machine(machine.root, {"etc/hosts": hosts})
    finding = only(OWN, machine)
    assert finding.fix.startswith("sudo cp /etc/hosts /etc/hosts.before")
    assert "127.0.2.1 node1.lan node1" in finding.evidence
    assert finding == snapshot
    assert "remote=[127.0.2.1]" in finding.why


def test_an_unknown_name(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    know(monkeypatch)
    finding = only(OWN, machine)
    assert (finding.name, finding.status) == ("name-unresolvable", Status.WARNING)
    assert finding == snapshot
    assert finding.fix == f"echo '{HOSTS}' | sudo tee -a /etc/hosts"


def test_a_name_that_leads_elsewhere(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    know(monkeypatch, node1=["10.0.0.99"])
    finding = only(OWN, machine)
    assert (finding.name, finding.status) == ("name-leads-elsewhere", Status.WARNING)
    assert "10.0.0.99" in finding.what
    assert finding == snapshot
    assert "10.0.0.5" in finding.evidence


@pytest.mark.parametrize(
    ("addresses", "status"),
    [([], Status.FAILURE), (["10.0.0.7"], Status.FAILURE), (["::1"], Status.NOTE)],
)
def test_localhost(
    machine: Surroundings,
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str],
    status: Status,
    snapshot: SnapshotAssertion,
) -> None:
    know(monkeypatch, node1=["10.0.0.5"], localhost=addresses)
    finding = only(OWN, machine)
    assert (finding.name, finding.status) == ("localhost-wrong", status)
    assert finding.fix.startswith("echo '127.0.0.1 localhost' |")
    assert finding == snapshot


def test_a_lookup_that_does_not_end_is_given_up(
    machine: Surroundings,
    monkeypatch: pytest.MonkeyPatch,
    silence: Callable[[str], Sequence[str]],
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setattr(names, "_GIVEN_UP_S", 0.05)
    monkeypatch.setattr("torchmuster.launch.network.interfaces.resolve_host", silence)
    findings = found(OWN, machine)
    assert set(findings) == {"name-lookup-slow"}
    assert findings["name-lookup-slow"].status is Status.WARNING
    assert findings["name-lookup-slow"] == snapshot


def test_a_name_server_that_does_not_answer(
    machine: Surroundings,
    monkeypatch: pytest.MonkeyPatch,
    silence: Callable[[str], Sequence[str]],
    snapshot: SnapshotAssertion,
) -> None:

    def name_of(address: str) -> Sequence[str]:
        if address == "10.0.0.5":  # is in /etc/hosts; the other has to be asked for
            monkeypatch.setattr(names, "_GIVEN_UP_S", 0.05)
            return []
        return silence(address)

    monkeypatch.setattr(names, "_name_of", name_of)
    finding = only(REVERSE, machine)
    assert (finding.name, finding.status) == ("reverse-lookup-slow", Status.WARNING)
    assert "10.0.0.254" in finding.what
    assert finding == snapshot
    assert finding.evidence == "/etc/resolv.conf: nameserver 10.0.0.53"
