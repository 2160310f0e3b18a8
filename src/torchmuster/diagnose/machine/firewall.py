"""The firewall of this machine: which one is on, and whether it lets in what ranks need."""

import ipaddress
import re
from collections.abc import Iterator

import psutil

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import packet_filter
from torchmuster.diagnose.machine.packet_filter import Closed, Table
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.firewall import open_command

_RANKS_PORTS = (32768, 60999)  # what Linux gives out unless told otherwise
_NOBODYS = "192.0.2.0/24"  # for examples; it stands for a network that is not known
_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"
# As launch.network.firewall writes them: the program that a manager of rules is told by.
_PROGRAMS = {"ufw": "sudo ufw", "firewalld": "sudo firewall-cmd", "": "sudo iptables"}


def linux(surroundings: Surroundings) -> Iterator[Finding]:
    """Follow the kernel's rules where they may be seen; else say which firewall is on."""
    manager = _manager(surroundings)
    tables = _tables(surroundings)
    if tables is None:
        yield _unseen(manager)
        return
    ranks = _ranks_ports(surroundings)
    middle = (ranks[0] + ranks[1]) // 2
    meeting = packet_filter.closed(tables, USUAL_PORT)
    talking = next(
        (found for port in (*ranks, middle) if (found := packet_filter.closed(tables, port))), None
    )
    if meeting:
        yield _closed(
            "firewall-meeting-closed", USUAL_PORT, "at which machines meet", meeting, manager
        )
    if talking:
        yield _closed("firewall-ranks-closed", ranks, "at which ranks talk", talking, manager)
    if not meeting and not talking:
        on = f"{manager} is on and lets" if manager else "no rule keeps"
        what = f"{on} others {'in at' if manager else 'from'} the ports of a run"
        yield Finding(name="firewall", status=Status.OK, what=what)


def _tables(surroundings: Surroundings) -> list[Table] | None:
    """Return the rules of the kernel; None where they may not be seen."""
    old = surroundings.output(["iptables", "-S"], within_s=5.0)
    new = surroundings.output(["nft", "-j", "list", "ruleset"], within_s=5.0)
    if old is None and new is None:
        return None
    tables = packet_filter.from_nftables(new or "")
    if old is not None:
        # A newer iptables keeps its rules in nftables, where they can be seen but not understood.
        tables = [one for one in tables if one.name != "ip filter"]
        tables.insert(0, packet_filter.from_iptables(old))
    return tables


def _manager(surroundings: Surroundings) -> str:
    settings = surroundings.text("/etc/ufw/ufw.conf") or ""
    if re.search(r"^ENABLED=yes", settings, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if surroundings.path("/run/firewalld.pid").exists() else ""


def _unseen(manager: str) -> Finding:
    if not manager:
        what = "only root may see the rules; muster check tries the ports"
        return Finding(name="firewall", status=Status.OK, what=what)
    shown = "sudo ufw status" if manager == "ufw" else "sudo firewall-cmd --list-all"
    return Finding(
        name="firewall-on",
        status=Status.NOTE,
        what=f"a firewall is on ({manager}); only root may see what it lets in",
        why=f"machines meet at port {USUAL_PORT}, and ranks talk at ports that the system gives out",
        fix=f"{shown}  # what it lets in\n{_command(manager, USUAL_PORT)}",
    )


def _ranks_ports(surroundings: Surroundings) -> tuple[int, int]:
    words = (surroundings.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else _RANKS_PORTS


def _closed(
    name: str, port: int | tuple[int, int], use: str, closed: Closed, manager: str
) -> Finding:
    ports = f"port {port}" if isinstance(port, int) else f"ports {port[0]} to {port[1]}"
    verb = "drops" if closed.verdict == packet_filter.DROP else "rejects"
    return Finding(
        name=name,
        status=Status.NOTE,  # so servers come; whether it keeps anybody out is tried by the links of check
        what=f"the firewall of this machine {verb} what others send to {ports}, {use}",
        why="runs on this machine alone are not concerned; in a run over several machines the others "
        + ("wait in vain" if verb == "drops" else "are refused")
        + "; muster check tries it",
        fix=_command(manager, port, closed),
        evidence=f"{closed.table} {closed.chain}: {closed.rule}",
    )


def _command(manager: str, port: int | tuple[int, int], closed: Closed | None = None) -> str:
    if not manager and closed and closed.chain != "INPUT":
        ports = port if isinstance(port, int) else f"{port[0]}-{port[1]}"
        rule = f"ip saddr {_own_network() or 'NETWORK'} tcp dport {ports} accept"
        return f"sudo nft insert rule {closed.table} {closed.chain} {rule}"
    lines = _opened("linux", port).splitlines()
    program = _PROGRAMS[manager]
    return next(line.partition("  #")[0] for line in lines if line.startswith(program))


def _opened(system: str, port: int | tuple[int, int]) -> str:
    """Return what lets in the own network, and nobody else; NETWORK where that is not known."""
    command = open_command(system, port, source=_own_network() or _NOBODYS)
    return command.replace(_NOBODYS, "NETWORK")


def _own_network() -> str | None:
    """Return the network in which others most likely reach this machine; None if it is alone in it."""
    best = next((one for one in network.candidates() if ":" not in one.address), None)
    if best is None:
        return None
    for item in psutil.net_if_addrs().get(best.interface, ()):
        if item.address == best.address and item.netmask:
            found = ipaddress.ip_network(f"{item.address}/{item.netmask}", strict=False)
            return str(found) if found.num_addresses > 1 else None
    return None


def windows(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the firewall of the network that Windows is on."""
    told = surroundings.output(["netsh", "advfirewall", "show", "currentprofile"]) or ""
    if not re.search(r"^State\s+ON", told, re.MULTILINE):
        yield Finding(name="firewall", status=Status.OK, what="it is off, or could not be seen")
        return
    profile = re.search(r"^(\w+) Profile Settings", told, re.MULTILINE)
    yield Finding(
        name="firewall-on",
        status=Status.NOTE,
        what="Windows' firewall is on" + (f" ({profile[1].lower()} network)" if profile else ""),
        why=f"it keeps others from port {USUAL_PORT} and from the ports of ranks unless a rule lets them in",
        fix="# in PowerShell as administrator:\n"
        f"{_opened('win32', USUAL_PORT)}\n{_opened('win32', (49152, 65535))}",
        evidence="netsh advfirewall show currentprofile",
    )


def macos(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the application firewall of macOS."""
    told = surroundings.output([_ALF, "--getglobalstate"]) or ""
    if "enabled" not in told:
        yield Finding(name="firewall", status=Status.OK, what="it is off, or could not be seen")
        return
    yield Finding(
        name="firewall-on",
        status=Status.NOTE,
        what="the firewall of macOS is on",
        why="it asks, on the screen, whether Python may be reached; where nobody answers it may not",
        fix=open_command("darwin", USUAL_PORT),
        evidence=told.strip(),
    )


_ASKS = "Does the firewall let in what ranks need?"
CHECKS = (
    Check(name="firewall", asks=_ASKS, run=linux, systems=("linux",)),
    Check(name="firewall", asks=_ASKS, run=windows, systems=("win32",)),
    Check(name="firewall", asks=_ASKS, run=macos, systems=("darwin",)),
)
