"""Interfaces, routes, ports for connections."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, made_up_machine, only
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.network_interfaces import CHECKS
from torchmuster.finding import Status
from torchmuster.launch.network.interfaces import Interface

INTERFACES, ROUTES = CHECKS
LOOPBACK = Interface(name="lo", up=True, addresses=("127.0.0.1", "::1"))
ETHERNET = Interface(name="eth0", up=True, addresses=("10.0.0.5", "fe80::5"))


def card(name: str = "eth0", /, **values: object) -> dict[str, object]:
    usual = {"carrier": 1, "speed": 10000, "duplex": "full", "mtu": 1500}
    return {f"sys/class/net/{name}/{file}": value for file, value in {**usual, **values}.items()}


def counters(**values: int) -> dict[str, object]:
    return {f"sys/class/net/eth0/statistics/{file}": value for file, value in values.items()}


def machine(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, object] | None = None,
    *others: Interface,
) -> Surroundings:
    known = (LOOPBACK, ETHERNET, *others)
    monkeypatch.setattr("torchmuster.launch.network.interfaces.read_interfaces", lambda: known)
    return made_up_machine(root, card() | (files or {}))


def test_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torchmuster.launch.network.interfaces.read_interfaces", lambda: (LOOPBACK,)
    )
    finding = only(INTERFACES, made_up_machine(tmp_path))
    assert (finding.name, finding.status) == ("no-network", Status.NOTE)


def test_dockers_bridge_without_containers_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = Interface(name="docker0", up=True, addresses=("172.17.0.1",))
    files = card("docker0", carrier=0, speed=10) | {"sys/class/net/docker0/bridge/bridge_id": ""}
    all_well(INTERFACES, machine(tmp_path, monkeypatch, files, bridge))


def test_no_cable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    second = Interface(name="eno1", up=False, addresses=("192.168.7.5",))
    files = card("eno1", carrier=0, flags="0x1003")
    finding = only(INTERFACES, machine(tmp_path, monkeypatch, files, second))
    assert (finding.name, finding.status) == ("no-carrier", Status.NOTE)
    assert "eno1" in finding.what
    assert finding.fix.endswith("ip link set eno1 down")
    assert finding == snapshot
    off = card("eno1", carrier=0, flags="0x1002")
    all_well(INTERFACES, machine(tmp_path, monkeypatch, off, second))


@pytest.mark.parametrize(
    ("ports", "name", "status"),
    [
        ("50000 50010", "ports-few", Status.WARNING),
        ("50000 50499", "ports-few", Status.NOTE),
        ("32768 60999", "routes", Status.OK),
    ],
)
def test_ports_for_connections(tmp_path: Path, ports: str, name: str, status: Status) -> None:
    files = {
        "proc/sys/net/ipv4/ip_local_port_range": ports.replace(" ", "\t"),
    }
    finding = only(ROUTES, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == (name, status)
    if name == "ports-few":
        assert finding.fix == 'sudo sysctl net.ipv4.ip_local_port_range="32768 60999"'
