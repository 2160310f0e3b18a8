"""The command that opens a port, for each firewall; and which one a machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchmuster.launch.network import firewall
from torchmuster.launch.network.firewall import Kind


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("ufw", "sudo ufw allow 29400/tcp"),
        ("firewalld", "sudo firewall-cmd --add-port=29400/tcp"),
        ("nft", "sudo nft insert rule inet filter input tcp dport 29400 accept"),
        ("iptables", "sudo iptables -I INPUT -p tcp --dport 29400 -j ACCEPT"),
    ],
)
def test_a_port_on_linux(kind: Kind, command: str) -> None:
    assert firewall.open_command("linux", 29400, kind=kind) == command


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("ufw", "sudo ufw allow from 10.0.0.0/24 to any port 50000:50100 proto tcp"),
        (
            "firewalld",
            'sudo firewall-cmd --add-rich-rule=\'rule family="ipv4" source '
            'address="10.0.0.0/24" port port="50000-50100" protocol="tcp" accept\'',
        ),
        (
            "nft",
            "sudo nft insert rule inet filter input ip saddr 10.0.0.0/24 "
            "tcp dport 50000-50100 accept",
        ),
        (
            "iptables",
            "sudo iptables -I INPUT -s 10.0.0.0/24 -p tcp --dport 50000:50100 -j ACCEPT",
        ),
    ],
)
def test_a_range_of_ports_for_one_network(kind: Kind, command: str) -> None:
    assert (
        firewall.open_command("linux", (50000, 50100), kind=kind, source="10.0.0.0/24") == command
    )


def test_ipv6_has_words_of_its_own() -> None:
    nft = firewall.open_command("linux", 29400, kind="nft", source="fd00::/64")
    iptables = firewall.open_command("linux", 29400, kind="iptables", source="fd00::7")
    assert "ip6 saddr fd00::/64" in nft
    assert iptables == "sudo ip6tables -I INPUT -s fd00::7/128 -p tcp --dport 29400 -j ACCEPT"


def test_where_the_firewall_of_a_linux_machine_is_not_known_each_usual_one_has_its_line() -> None:
    assert firewall.open_command("linux", 29400).splitlines() == [
        "sudo ufw allow 29400/tcp  # Ubuntu",
        "sudo firewall-cmd --add-port=29400/tcp  # Fedora, RHEL, SUSE",
        "sudo iptables -I INPUT -p tcp --dport 29400 -j ACCEPT  # others",
    ]


def test_windows() -> None:
    assert firewall.open_command("win32", 29400) == (
        'New-NetFirewallRule -DisplayName "torchmuster 29400" -Direction Inbound '
        "-LocalPort 29400 -Protocol TCP -Action Allow"
    )
    limited = firewall.open_command("win32", (50000, 50100), source="10.0.0.0/24")
    assert "-LocalPort 50000-50100 -Protocol TCP -RemoteAddress 10.0.0.0/24 -Action" in limited


def test_macos_lets_in_programs() -> None:
    lines = firewall.open_command("darwin", 29400).splitlines()
    assert lines[0].startswith("sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add ")
    assert " --unblockapp " in lines[1]


def test_a_source_that_is_no_network_never_gets_into_a_command() -> None:
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 network"):
        firewall.open_command("linux", 29400, kind="ufw", source="10.0.0.1; rm -rf /")


def has(*tools: str) -> Callable[[str], str | None]:
    return lambda tool: f"/usr/sbin/{tool}" if tool in tools else None


def running(*services: str) -> Callable[[str], bool]:
    return lambda service: service in services


def machine_with_ufw(root: Path, enabled: str) -> Path:
    (root / "etc/ufw").mkdir(parents=True)
    (root / "etc/ufw/ufw.conf").write_text(f"# settings\nENABLED={enabled}\nLOGLEVEL=low\n")
    return root


def test_ufw_is_told_if_it_is_switched_on(tmp_path: Path) -> None:
    root = machine_with_ufw(tmp_path, "yes")
    assert firewall.detect(has("ufw", "iptables"), root=root, active=running()) == "ufw"


def test_ufw_is_not_told_if_it_is_switched_off(tmp_path: Path) -> None:
    root = machine_with_ufw(tmp_path, "no")
    assert firewall.detect(has("ufw", "iptables"), root=root, active=running()) == "iptables"


@pytest.mark.parametrize(
    ("tools", "services", "kind"),
    [
        (["firewall-cmd", "nft", "iptables"], ["firewalld"], "firewalld"),
        (["firewall-cmd", "nft", "iptables"], [], "iptables"),
        (["nft", "iptables"], ["nftables"], "nft"),
        (["nft"], [], "nft"),
        ([], [], None),
    ],
)
def test_which_firewall_a_machine_has(
    tmp_path: Path, tools: list[str], services: list[str], kind: Kind | None
) -> None:
    assert firewall.detect(has(*tools), root=tmp_path, active=running(*services)) == kind


def test_a_machine_without_systemd_has_no_active_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not firewall.is_active("firewalld")
    (tmp_path / "systemctl").write_text('#!/bin/sh\n[ "$*" = "is-active --quiet firewalld" ]\n')
    (tmp_path / "systemctl").chmod(0o755)
    assert firewall.is_active("firewalld")
    assert not firewall.is_active("nftables")
