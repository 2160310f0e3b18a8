"""Which firewall is on, as each system tells it."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, made_up_machine, only
from torchmuster.diagnose.machine.firewall import CHECKS
from torchmuster.finding import Status

LINUX, WINDOWS, MACOS = CHECKS
RECORDED = Path(__file__).with_name("recorded")


def ufw(ports: str) -> str:
    return f"sudo ufw allow from 10.0.0.0/24 to any port {ports} proto tcp"


def firewalld(ports: str) -> str:
    rule = (
        f'rule family="ipv4" source address="10.0.0.0/24" port port="{ports}" protocol="tcp" accept'
    )
    return f"sudo firewall-cmd --add-rich-rule='{rule}'"


@pytest.fixture(autouse=True)
def own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is 10.0.0.5 in a network of 256."""
    have_address(monkeypatch, "10.0.0.5", "255.255.255.0")


def have_address(monkeypatch: pytest.MonkeyPatch, address: str, netmask: str | None) -> None:
    item = SimpleNamespace(family=socket.AF_INET, address=address, netmask=netmask)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [item]})
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True, speed=1000)}
    )


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def test_without_a_manager_nothing_is_claimed(tmp_path: Path) -> None:
    assert "neither ufw nor firewalld" in all_well(LINUX, made_up_machine(tmp_path))


@pytest.mark.parametrize(
    ("files", "manager", "fix"),
    [
        ({"etc/ufw/ufw.conf": "# /etc\nENABLED=yes\n"}, "ufw", ufw("29400")),
        ({"run/firewalld.pid": "812"}, "firewalld", firewalld("29400")),
    ],
    ids=["ufw", "firewalld"],
)
def test_which_firewall_is_on(
    tmp_path: Path,
    files: dict[str, object],
    manager: str,
    fix: str,
    snapshot: SnapshotAssertion,
) -> None:
    finding = only(LINUX, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == ("firewall-on", Status.NOTE)
    assert finding.what.endswith(manager)
    assert fix in finding.fix
    assert finding == snapshot


def test_without_a_known_network_the_command_says_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_address(monkeypatch, "10.0.0.5", None)
    finding = only(LINUX, made_up_machine(tmp_path, {"run/firewalld.pid": "812"}))
    assert 'address="NETWORK"' in finding.fix


def test_windows(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    facts = json.loads(recorded("windows_11.json"))
    finding = only(WINDOWS, made_up_machine(tmp_path, **facts))
    assert (finding.name, finding.status) == ("firewall-on", Status.NOTE)
    assert 'New-NetFirewallRule -DisplayName "torchmuster 29400"' in finding.fix
    assert finding.fix.count("-RemoteAddress 10.0.0.0/24") == 2
    assert finding == snapshot
    all_well(WINDOWS, made_up_machine(tmp_path, system="win32"))


def test_macos(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    facts = json.loads(recorded("macos_15.json"))
    finding = only(MACOS, made_up_machine(tmp_path, **facts))
    assert (finding.name, finding.status) == ("firewall-on", Status.NOTE)
    assert "socketfilterfw --unblockapp" in finding.fix
    assert finding == snapshot
    command = "/usr/libexec/ApplicationFirewall/socketfilterfw --getglobalstate"
    off = {command: "Firewall is disabled. (State = 0)\n"}
    all_well(MACOS, made_up_machine(tmp_path, system="darwin", outputs=off))
