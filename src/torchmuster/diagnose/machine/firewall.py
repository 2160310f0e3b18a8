"""The firewall of this host: which one is active, and whether it allows the ports of a run."""

import ipaddress
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.firewall import open_command

ACCEPT, DROP, REJECT, RETURN = "accept", "drop", "reject", "return"
_CLOSES = (DROP, REJECT)
_DEEPEST = 20


@dataclass(frozen=True, kw_only=True)
class FilterRule:
    """A filter rule: the connections it matches and its target.

    ``ports`` None means all. ``certain`` is False if it also depends on conditions unknown here.
    """

    target: str
    text: str
    ports: tuple[tuple[int, int], ...] | None = None
    concerns_new: bool = True
    certain: bool = True
    goes_for_good: bool = False

    def concerns(self, port: int) -> bool:
        """Return whether the rule may match a new connection to a port."""
        meant = self.ports is None or any(first <= port <= last for first, last in self.ports)
        return meant and self.concerns_new


@dataclass(kw_only=True)
class FilterTable:
    """Chains of one table; ``entries`` are the chains that packets enter first, with policies."""

    name: str
    chains: dict[str, list[FilterRule]] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClosedPort:
    """What closes a port: table, chain, verdict (drop or reject), and the rule."""

    table: str
    chain: str
    verdict: str
    rule: str


def closing_rule(tables: Sequence[FilterTable], port: int) -> ClosedPort | None:
    """Return the rule that closes a port to other hosts; None if it is open."""
    for table in tables:
        for entry, policy in table.entries.items():
            verdict, rule = _follow(table.chains, entry, port, 0) or (policy, f"policy {policy}")
            if verdict in _CLOSES:
                return ClosedPort(table=table.name, chain=entry, verdict=verdict, rule=rule)
    return None


def _follow(
    chains: Mapping[str, Sequence[FilterRule]], chain: str, port: int, depth: int
) -> tuple[str, str] | None:
    """Return the verdict on a new connection and the rule that decided it; None if none did."""
    doubtful = False  # whether the kernel may have left the chain before this rule
    for rule in chains.get(chain, ()) if depth < _DEEPEST else ():
        if not rule.concerns(port):
            continue
        found: tuple[str, str] | None = (rule.target, rule.text)
        if rule.target in chains:
            found = _follow(chains, rule.target, port, depth + 1)
        elif rule.target not in (ACCEPT, RETURN, *_CLOSES):
            continue  # counts or logs only
        leaves = rule.target == RETURN or rule.goes_for_good
        if found and (found[0] == ACCEPT or (found[0] in _CLOSES and rule.certain)):
            return None if doubtful and found[0] != ACCEPT else found
        if leaves and rule.certain:
            return None
        doubtful |= leaves
    return None


# ---- iptables

_KNOWN = {"-A", "-m", "-p", "-i", "-j", "-g", "--dport", "--dports", "--ctstate", "--state"}
_KNOWN |= {"--comment", "--reject-with", "--tcp-flags", "--dst-type", "--ctstatus"}
_NEW_CONNECTION = ["--tcp-flags", "FIN,SYN,RST,ACK", "SYN"]
_LAST_PORT = 65535
_TARGETS = {"ACCEPT": ACCEPT, "DROP": DROP, "REJECT": REJECT, "RETURN": RETURN}


def from_iptables(listing: str) -> FilterTable:
    """Parse the output of ``iptables -S``."""
    table = FilterTable(name="ip filter")
    for line in listing.splitlines():
        words = shlex.split(line)
        if words[:2] == ["-P", "INPUT"]:
            table.entries["INPUT"] = _TARGETS.get(words[2], ACCEPT)
        elif words[:1] == ["-A"] and len(words) > 1:
            table.chains.setdefault(words[1], []).append(_iptables_rule(words, line))
        elif words[:1] == ["-N"] and len(words) > 1:
            table.chains.setdefault(words[1], [])
    return table


def _iptables_rule(words: Sequence[str], line: str) -> FilterRule:
    options: dict[str, str] = {}
    negated = set()
    for before, option, value in zip(["", *words], words, [*words[1:], ""], strict=False):
        if option.startswith("-"):
            options[option] = value
            negated |= {option} if before == "!" else set()
    listed = options.get("--dport", options.get("--dports"))
    ports = None if listed is None else list(_ranges(listed))
    if ports is not None and negated & {"--dport", "--dports"}:
        ports = list(_others(ports))
    from_elsewhere = "-i" in negated and options["-i"] == "lo"
    odd = negated - {"--dport", "--dports"} - ({"-i"} if from_elsewhere else set())
    flags = words.index("--tcp-flags") if "--tcp-flags" in words else None
    odd |= {"--tcp-flags"} if flags and list(words[flags : flags + 3]) != _NEW_CONNECTION else set()
    target = options.get("-j", options.get("-g", ""))
    return FilterRule(
        target=_TARGETS.get(target, target),
        text=line,
        ports=None if ports is None else tuple(ports),
        concerns_new=bool(odd) or from_elsewhere or _may_be_new(options),
        certain=set(options) <= _KNOWN and not odd,
        goes_for_good="-g" in options,
    )


def _may_be_new(options: Mapping[str, str]) -> bool:
    """Return whether a rule may match a new TCP connection from another host to this one."""
    states = options.get("--ctstate", options.get("--state", "NEW")).split(",")
    return (
        "NEW" in states
        and options.get("-p", "tcp") in ("tcp", "all", "6")
        and options.get("-i") != "lo"
        and options.get("--dst-type", "LOCAL") == "LOCAL"
        and "--ctstatus" not in options  # matches connections forwarded to containers
    )


def _ranges(listed: str) -> Iterator[tuple[int, int]]:
    for part in listed.split(","):
        first, _, last = part.partition(":")
        if first.isdecimal():
            yield int(first), int(last or first)


def _others(ports: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return the port ranges outside these."""
    free = 0
    for first, last in sorted(ports):
        if first > free:
            yield free, first - 1
        free = max(free, last + 1)
    if free <= _LAST_PORT:
        yield free, _LAST_PORT


# ---- nftables


def from_nftables(listing: str) -> list[FilterTable]:
    """Parse the output of ``nft -j list ruleset``."""
    try:
        items = json.loads(listing)["nftables"]
    except (ValueError, KeyError, TypeError):
        return []
    tables: dict[str, FilterTable] = {}
    for item in items:
        (kind, content), *_ = item.items() if item else [("", {})]
        if kind not in ("chain", "rule") or content.get("family") not in ("ip", "inet"):
            continue
        name = f"{content['family']} {content['table']}"
        table = tables.setdefault(name, FilterTable(name=name))
        if kind == "rule":
            table.chains.setdefault(content["chain"], []).append(_nftables_rule(content))
            continue
        table.chains.setdefault(content["name"], [])
        if content.get("hook") == "input" and content.get("type") == "filter":
            table.entries[content["name"]] = content.get("policy", ACCEPT)
    return list(tables.values())


def _nftables_rule(content: Mapping[str, Any]) -> FilterRule:
    rule: dict[str, Any] = {"target": "", "certain": True, "concerns_new": True, "ports": None}
    shown = []
    for part in content.get("expr", ()):
        (kind, value), *_ = part.items()
        if kind == "match":
            shown.append(_nftables_match(value, rule))
        elif kind in (ACCEPT, DROP, REJECT, RETURN):
            rule["target"] = kind
        elif kind in ("jump", "goto"):
            rule["target"], rule["goes_for_good"] = value["target"], kind == "goto"
        elif kind not in ("counter", "log"):
            rule["certain"] = False
    text = f"{content['chain']}: {' '.join([*shown, rule['target']])}"
    return FilterRule(**rule, text=text)


def _nftables_match(match: Mapping[str, Any], rule: dict[str, Any]) -> str:
    """Record in ``rule`` what a match means for a new TCP connection, and return it as text."""
    left, right = match["left"], match["right"]
    ((kind, about),) = left.items() if isinstance(left, dict) else [("", {})]
    about = about if isinstance(about, dict) else {}
    what = about.get("field") or about.get("key") or kind
    values = [str(one) for one in _firewall_values(right)]
    plain = match.get("op") in ("==", "in")
    if what == "dport" and about.get("protocol") in ("tcp", "th") and plain:
        rule["ports"] = tuple(_port_pairs(right))
    elif what == "dport" and about.get("protocol") == "udp":
        rule["concerns_new"] = False
    elif what == "state" and plain:
        rule["concerns_new"] &= "new" in values
    elif what == "status":  # matches connections forwarded to containers
        rule["concerns_new"] = False
    elif what in ("l4proto", "protocol", "nexthdr") and plain:
        rule["concerns_new"] &= "tcp" in values
    elif what in ("iifname", "iif") and (plain or values == ["lo"]):
        rule["concerns_new"] &= values != ["lo"] or not plain
    else:
        rule["certain"] = False
    return f"{what} {','.join(values)}"


def _firewall_values(right: Any) -> list[Any]:
    if isinstance(right, dict) and "set" in right:
        right = right["set"]
    return right if isinstance(right, list) else [right]


def _port_pairs(right: Any) -> Iterator[tuple[int, int]]:
    for one in _firewall_values(right):
        if isinstance(one, dict) and "range" in one:
            first, last = one["range"]
            yield int(first), int(last)
        elif re.fullmatch(r"\d+", str(one)):
            yield int(one), int(one)


_RANKS_PORTS = (32768, 60999)  # Linux's default ephemeral ports
_NOBODYS = "192.0.2.0/24"  # TEST-NET-1: placeholder for an unknown network
_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"
# The program of each firewall manager, as launch.network.firewall writes it.
_PROGRAMS = {"ufw": "sudo ufw", "firewalld": "sudo firewall-cmd", "": "sudo iptables"}


def linux(surroundings: Surroundings) -> Iterator[Finding]:
    """Evaluate the kernel's rules where they are readable; else report which firewall is active."""
    manager = _manager(surroundings)
    tables = _tables(surroundings)
    if tables is None:
        yield _unseen(manager)
        return
    ranks = _ranks_ports(surroundings)
    middle = (ranks[0] + ranks[1]) // 2
    meeting = closing_rule(tables, USUAL_PORT)
    talking = next(
        (found for port in (*ranks, middle) if (found := closing_rule(tables, port))), None
    )
    if meeting:
        yield _closed(
            "firewall-meeting-closed", USUAL_PORT, "the rendezvous port", meeting, manager
        )
    if talking:
        yield _closed("firewall-ranks-closed", ranks, "used between ranks", talking, manager)
    if not meeting and not talking:
        on = f"{manager} is active and allows" if manager else "no rule blocks"
        what = f"{on} {'connections to ' if manager else ''}the ports of a run"
        yield Finding(name="firewall", status=Status.OK, what=what)


def _tables(surroundings: Surroundings) -> list[FilterTable] | None:
    """Return the kernel's rules; None if they are not readable."""
    old = surroundings.output(["iptables", "-S"], within_s=5.0)
    new = surroundings.output(["nft", "-j", "list", "ruleset"], within_s=5.0)
    if old is None and new is None:
        return None
    tables = from_nftables(new or "")
    if old is not None:
        # iptables-nft keeps its rules in nftables, in a form that this parser does not read.
        tables = [one for one in tables if one.name != "ip filter"]
        tables.insert(0, from_iptables(old))
    return tables


def _manager(surroundings: Surroundings) -> str:
    settings = surroundings.text("/etc/ufw/ufw.conf") or ""
    if re.search(r"^ENABLED=yes", settings, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if surroundings.path("/run/firewalld.pid").exists() else ""


def _unseen(manager: str) -> Finding:
    if not manager:
        what = "only root can read the rules; muster check tests the ports"
        return Finding(name="firewall", status=Status.OK, what=what)
    shown = "sudo ufw status" if manager == "ufw" else "sudo firewall-cmd --list-all"
    return Finding(
        name="firewall-on",
        status=Status.NOTE,
        what=f"a firewall is active ({manager}); only root can read its rules",
        why=f"a run needs port {USUAL_PORT} (rendezvous) and ephemeral ports (between ranks)",
        fix=f"{shown}  # shows what it allows\n{_command(manager, USUAL_PORT)}",
    )


def _ranks_ports(surroundings: Surroundings) -> tuple[int, int]:
    words = (surroundings.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else _RANKS_PORTS


def _closed(
    name: str, port: int | tuple[int, int], use: str, closed: ClosedPort, manager: str
) -> Finding:
    ports = f"port {port}" if isinstance(port, int) else f"ports {port[0]} to {port[1]}"
    verb = "drops" if closed.verdict == DROP else "rejects"
    return Finding(
        name=name,
        status=Status.NOTE,  # the default on servers; muster check tests the links themselves
        what=f"the firewall of this host {verb} connections to {ports}, {use}",
        why="single-host runs are not affected; in a run over several hosts the others "
        + ("time out" if verb == "drops" else "are refused")
        + "; muster check tests it",
        fix=_command(manager, port, closed),
        evidence=f"{closed.table} {closed.chain}: {closed.rule}",
    )


def _command(manager: str, port: int | tuple[int, int], closed: ClosedPort | None = None) -> str:
    if not manager and closed and closed.chain != "INPUT":
        ports = port if isinstance(port, int) else f"{port[0]}-{port[1]}"
        rule = f"ip saddr {_own_network() or 'NETWORK'} tcp dport {ports} accept"
        return f"sudo nft insert rule {closed.table} {closed.chain} {rule}"
    lines = _opened("linux", port).splitlines()
    program = _PROGRAMS[manager]
    return next(line.partition("  #")[0] for line in lines if line.startswith(program))


def _opened(system: str, port: int | tuple[int, int]) -> str:
    """Return the command that allows only the local network; NETWORK if it is not known."""
    command = open_command(system, port, source=_own_network() or _NOBODYS)
    return command.replace(_NOBODYS, "NETWORK")


def _own_network() -> str | None:
    """Return the network at which others most likely reach this host; None if there is none."""
    best = next((one for one in network.interface_candidates() if ":" not in one.address), None)
    if best is None:
        return None
    for item in psutil.net_if_addrs().get(best.interface, ()):
        if item.address == best.address and item.netmask:
            found = ipaddress.ip_network(f"{item.address}/{item.netmask}", strict=False)
            return str(found) if found.num_addresses > 1 else None
    return None


def windows(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the Windows firewall of the current network profile."""
    told = surroundings.output(["netsh", "advfirewall", "show", "currentprofile"]) or ""
    if not re.search(r"^State\s+ON", told, re.MULTILINE):
        yield Finding(name="firewall", status=Status.OK, what="off, or its state is not readable")
        return
    profile = re.search(r"^(\w+) Profile Settings", told, re.MULTILINE)
    yield Finding(
        name="firewall-on",
        status=Status.NOTE,
        what="Windows firewall is active" + (f" ({profile[1].lower()} network)" if profile else ""),
        why=f"it blocks port {USUAL_PORT} and the ports of ranks unless a rule allows them",
        fix="# in PowerShell as administrator:\n"
        f"{_opened('win32', USUAL_PORT)}\n{_opened('win32', (49152, 65535))}",
        evidence="netsh advfirewall show currentprofile",
    )


def macos(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the application firewall of macOS."""
    told = surroundings.output([_ALF, "--getglobalstate"]) or ""
    if "enabled" not in told:
        yield Finding(name="firewall", status=Status.OK, what="off, or its state is not readable")
        return
    yield Finding(
        name="firewall-on",
        status=Status.NOTE,
        what="the macOS firewall is active",
        why="macOS shows a dialog before Python may accept connections; without an answer it "
        "blocks",
        fix=open_command("darwin", USUAL_PORT),
        evidence=told.strip(),
    )


_ASKS = "Does the firewall allow the ports of a run?"
CHECKS = (
    Check(name="firewall", asks=_ASKS, run=linux, systems=("linux",)),
    Check(name="firewall", asks=_ASKS, run=windows, systems=("win32",)),
    Check(name="firewall", asks=_ASKS, run=macos, systems=("darwin",)),
)
