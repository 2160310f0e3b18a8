"""Interfaces, routes, ports for connections."""

from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, found, made_up_machine, only
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.network_interfaces import CHECKS
from torchmuster.finding import Status
from torchmuster.launch.network.interfaces import Interface

INTERFACES, ROUTES = CHECKS
LOOPBACK = Interface(name="lo", up=True, addresses=("127.0.0.1", "::1"))
ETHERNET = Interface(name="eth0", up=True, addresses=("10.0.0.5", "fe80::5"))
HEADER = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
DEFAULT = "eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n"
LAN = "{name} 0000000A 00000000 0001 0 0 {metric} 00FFFFFF 0 0 0\n"


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


def test_one_good_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_well(INTERFACES, machine(tmp_path, monkeypatch)) == "10.0.0.5 (eth0)"


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


def test_a_tunnel_says_nothing_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tunnel = Interface(name="tun0", up=True, addresses=("10.8.0.2",))
    files = card("tun0", speed=10) | {"sys/class/net/tun0/tun_flags": "0x1002"}
    all_well(INTERFACES, machine(tmp_path, monkeypatch, files, tunnel))


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


def test_no_cable_in_the_only_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Interface(name="eth0", up=False, addresses=("10.0.0.5",))
    monkeypatch.setattr(
        "torchmuster.launch.network.interfaces.read_interfaces", lambda: (LOOPBACK, alone)
    )
    files = card(carrier=0, flags="0x1003")
    findings = found(INTERFACES, made_up_machine(tmp_path, files))
    assert set(findings) == {"no-network", "no-carrier"}
    assert findings["no-carrier"].status is Status.WARNING


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"speed": 100}, "100 Mbit/s"),
        ({"speed": 1000, "duplex": "half"}, "half duplex"),
    ],
    ids=["speed", "duplex"],
)
def test_a_slow_link(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    seen: str,
    snapshot: SnapshotAssertion,
) -> None:
    finding = only(INTERFACES, machine(tmp_path, monkeypatch, card(**values)))
    assert (finding.name, finding.status) == ("link-slow", Status.WARNING)
    assert seen in finding.what
    assert finding.fix.startswith("sudo ethtool eth0")
    assert finding == snapshot


def test_a_speed_that_is_not_told_is_not_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_well(INTERFACES, machine(tmp_path, monkeypatch, card(speed=-1, duplex="unknown")))


@pytest.mark.parametrize(
    ("errors", "packets", "warns"),
    [(5000, 10**6, True), (5000, 10**9, False), (900, 1000, False)],
)
def test_errors_count_only_if_many_and_frequent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: int,
    packets: int,
    warns: bool,
    snapshot: SnapshotAssertion,
) -> None:
    files = counters(rx_packets=packets, tx_packets=0, rx_errors=errors, rx_dropped=10**6)
    findings = found(INTERFACES, machine(tmp_path, monkeypatch, files))
    assert ("link-errors" in findings) == warns
    if warns:
        assert "5,000" in findings["link-errors"].what
        assert findings["link-errors"] == snapshot


@pytest.mark.parametrize(
    ("mtu", "name", "status"),
    [(9000, "mtu-large", Status.NOTE), (576, "mtu-small", Status.WARNING)],
)
def test_packet_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mtu: int, name: str, status: Status
) -> None:
    finding = only(INTERFACES, machine(tmp_path, monkeypatch, card(mtu=mtu)))
    assert (finding.name, finding.status) == (name, status)
    assert f"{mtu} bytes" in finding.what


def test_several_interfaces_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    second = Interface(name="eth1", up=True, addresses=("10.1.0.5",))
    finding = only(INTERFACES, machine(tmp_path, monkeypatch, card("eth1"), second))
    assert (finding.name, finding.status) == ("several-interfaces", Status.NOTE)
    assert "eth0" in finding.why
    assert finding == snapshot
    assert "NCCL_SOCKET_IFNAME==eth0" in finding.fix


def test_the_same_address_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    second = Interface(name="eth1", up=True, addresses=("10.0.0.5", "fe80::5"))
    twice = found(INTERFACES, machine(tmp_path, monkeypatch, card("eth1"), second))["address-twice"]
    assert "10.0.0.5" in twice.what
    assert twice.fix.startswith("ip -br address  #")
    assert "sudo" not in twice.fix
    assert twice == snapshot


def test_routes(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "proc/net/route": HEADER + DEFAULT + LAN.format(name="eth0", metric=0),
        "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    }
    assert "eth0" in all_well(ROUTES, made_up_machine(tmp_path, files))
    files["proc/net/route"] = HEADER + LAN.format(name="eth0", metric=0)
    finding = only(ROUTES, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == ("no-default-route", Status.NOTE)


def test_two_ways_into_the_same_network(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    ways = LAN.format(name="eth0", metric=0) + LAN.format(name="wlan0", metric=600)
    finding = only(ROUTES, made_up_machine(tmp_path, {"proc/net/route": HEADER + DEFAULT + ways}))
    assert (finding.name, finding.status) == ("same-network-twice", Status.NOTE)
    assert "eth0 and wlan0" in finding.what
    assert finding == snapshot
    assert finding.fix.startswith("ip route  #")
    assert "sudo" not in finding.fix  # it may be the one by which the user is connected


@pytest.mark.parametrize(
    ("ports", "name", "status"),
    [
        ("50000 50010", "ports-few", Status.WARNING),
        ("50000 50499", "ports-few", Status.NOTE),
        ("1024 65535", "ports-overlap", Status.NOTE),
        ("32768 60999", "routes", Status.OK),
    ],
)
def test_ports_for_connections(tmp_path: Path, ports: str, name: str, status: Status) -> None:
    files = {
        "proc/net/route": HEADER + DEFAULT,
        "proc/sys/net/ipv4/ip_local_port_range": ports.replace(" ", "\t"),
    }
    finding = only(ROUTES, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == (name, status)
    if name == "ports-few":
        assert finding.fix == 'sudo sysctl net.ipv4.ip_local_port_range="32768 60999"'


def test_a_reserved_port_is_given_to_nobody(tmp_path: Path) -> None:
    files = {
        "proc/net/route": HEADER + DEFAULT,
        "proc/sys/net/ipv4/ip_local_port_range": "1024\t65535",
        "proc/sys/net/ipv4/ip_local_reserved_ports": "8080,29400-29500\n",
    }
    all_well(ROUTES, made_up_machine(tmp_path, files))
