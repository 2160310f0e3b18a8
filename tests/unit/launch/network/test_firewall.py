"""The command that opens a port, for each firewall."""

import pytest

from torchmuster.launch.network import firewall


def test_each_usual_firewall_of_linux_has_its_line() -> None:
    assert firewall.open_command("linux", 29400).splitlines() == [
        "sudo ufw allow 29400/tcp  # Ubuntu",
        "sudo firewall-cmd --add-port=29400/tcp  # Fedora, RHEL, SUSE",
        "sudo iptables -I INPUT -p tcp --dport 29400 -j ACCEPT  # others",
    ]


def test_a_range_of_ports_for_one_network() -> None:
    lines = firewall.open_command("linux", (50000, 50100), source="10.0.0.0/24").splitlines()
    assert [line.partition("  #")[0] for line in lines] == [
        "sudo ufw allow from 10.0.0.0/24 to any port 50000:50100 proto tcp",
        'sudo firewall-cmd --add-rich-rule=\'rule family="ipv4" source '
        'address="10.0.0.0/24" port port="50000-50100" protocol="tcp" accept\'',
        "sudo iptables -I INPUT -s 10.0.0.0/24 -p tcp --dport 50000:50100 -j ACCEPT",
    ]


def test_ipv6_has_words_of_its_own() -> None:
    _, firewalld, iptables = firewall.open_command("linux", 29400, source="fd00::7").splitlines()
    assert 'family="ipv6" source address="fd00::7/128"' in firewalld
    assert iptables.startswith("sudo ip6tables -I INPUT -s fd00::7/128 -p tcp --dport 29400 ")


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


def test_a_machine_whose_system_is_not_known_gets_the_lines_of_linux_and_windows() -> None:
    *linux, windows = firewall.open_command_anywhere(29400).splitlines()
    assert linux == firewall.open_command("linux", 29400).splitlines()
    assert windows == f"{firewall.open_command('win32', 29400)}  # Windows"


def test_a_source_that_is_no_network_never_gets_into_a_command() -> None:
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 network"):
        firewall.open_command("linux", 29400, source="10.0.0.1; rm -rf /")
