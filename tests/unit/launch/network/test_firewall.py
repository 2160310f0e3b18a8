"""The command that opens a port, for each firewall."""

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.network import firewall


def test_each_usual_firewall_of_linux_has_its_line(snapshot: SnapshotAssertion) -> None:
    commands = firewall.open_command("linux", 29400)
    assert commands == snapshot
    assert commands.count("29400") == 3


def test_windows(snapshot: SnapshotAssertion) -> None:
    assert firewall.open_command("win32", 29400) == snapshot
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
    with pytest.raises(ValueError, match="IPv4 or IPv6 network"):
        firewall.open_command("linux", 29400, source="10.0.0.1; rm -rf /")
