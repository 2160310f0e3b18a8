"""The firewall of this host: which one is active. ``muster check`` tests whether it closes ports."""

import ipaddress
import re
from collections.abc import Iterator

import psutil

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.firewall import open_command

_WINDOWS_RANKS_PORTS = (49152, 65535)
_UNKNOWN_NETWORK = "192.0.2.0/24"  # TEST-NET-1, which the shown command replaces
_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_SHOW = {"ufw": "sudo ufw status", "firewalld": "sudo firewall-cmd --list-all"}
_ASKS = "Does the firewall allow the ports of a run?"


def linux(surroundings: Surroundings) -> Iterator[Finding]:
    """Report which firewall manager is active."""
    manager = _manager(surroundings)
    if manager is None:
        yield Finding(name="firewall", status=Status.OK, what="neither ufw nor firewalld is active")
        return
    yield finding(
        "firewall-on",
        manager=manager,
        usual_port=USUAL_PORT,
        show=_SHOW[manager],
        command=_opened("linux", USUAL_PORT),
    )


def _manager(surroundings: Surroundings) -> str | None:
    settings = surroundings.text("/etc/ufw/ufw.conf") or ""
    if re.search(r"^ENABLED=yes", settings, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if surroundings.path("/run/firewalld.pid").exists() else None


def _opened(system: str, port: int | tuple[int, int]) -> str:
    """Return the command that allows only the local network; NETWORK if it is not known."""
    command = open_command(system, port, source=_own_network() or _UNKNOWN_NETWORK)
    return command.replace(_UNKNOWN_NETWORK, "NETWORK")


def _own_network() -> str | None:
    """Return the network at which others most likely reach this host; None if there is none."""
    best = next(
        (candidate for candidate in network.interface_candidates() if ":" not in candidate.address),
        None,
    )
    if best is None:
        return None
    for item in psutil.net_if_addrs().get(best.interface, ()):
        if item.address == best.address and item.netmask:
            found = ipaddress.ip_network(f"{item.address}/{item.netmask}", strict=False)
            return str(found) if found.num_addresses > 1 else None
    return None


def windows(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the Windows firewall of the current network profile."""
    output = surroundings.output(["netsh", "advfirewall", "show", "currentprofile"]) or ""
    if not re.search(r"^State\s+ON", output, re.MULTILINE):
        yield Finding(name="firewall", status=Status.OK, what="off, or its state is not readable")
        return
    profile = re.search(r"^(\w+) Profile Settings", output, re.MULTILINE)
    yield finding(
        "firewall-on:windows",
        network=f" ({profile[1].lower()} network)" if profile else "",
        usual_port=USUAL_PORT,
        rendezvous=_opened("win32", USUAL_PORT),
        ranks=_opened("win32", _WINDOWS_RANKS_PORTS),
    )


def macos(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the application firewall of macOS."""
    output = surroundings.output([_ALF, "--getglobalstate"]) or ""
    if "enabled" not in output:
        yield Finding(name="firewall", status=Status.OK, what="off, or its state is not readable")
        return
    yield finding(
        "firewall-on:macos", fix=open_command("darwin", USUAL_PORT), evidence=output.strip()
    )


CHECKS = (
    Check(name="firewall", asks=_ASKS, run=linux, systems=("linux",)),
    Check(name="firewall", asks=_ASKS, run=windows, systems=("win32",)),
    Check(name="firewall", asks=_ASKS, run=macos, systems=("darwin",)),
)
