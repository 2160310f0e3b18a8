"""Turn measured links between hosts into findings, each with its direction and its fix."""

import ipaddress
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.diagnose.blame import Blamed, blame
from torchmuster.diagnose.links.call import STALLED_S
from torchmuster.diagnose.links.model import End, Link, LinkFault, Problem, Scope, by_places
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status, worst_first
from torchmuster.launch.network import firewall, reach
from torchmuster.units import name_several

# Round trips that are high wherever the hosts are, and those that are never reported.
FAR_S, _NEAR_S, _TIMES_FARTHER = 0.010, 0.001, 5
# Slower than the first slows any training; faster than the second cannot be measured reliably.
SLOW_BYTES_PER_S, _FAST_BYTES_PER_S = 250e6 / 8, 1e9
_TIMES_SLOWER = 4
# Upper bound for the correction by the time that a busy host spent waiting.
_MOST_WAITING = 0.95
_USUAL_MTU, _TUNNEL_MTU = 1500, 1400
_LINES_SHOWN = 4
# Problems of the reverse direction that follow from these causes.
_CONSEQUENCES = {
    Problem.NO_ROUTE: {Problem.TIMEOUT, Problem.ABSENT},
    Problem.IMPOSTOR: {Problem.TIMEOUT, Problem.ABSENT, Problem.REFUSED, Problem.IMPOSTOR},
}
# By problem: the name of the finding, the problem in short, and why.
_CAUSES = {
    Problem.TIMEOUT: (
        "blocked-dropped",
        "its packets are dropped",
        "there is no reply: a firewall drops the packets silently",
    ),
    Problem.REFUSED: (
        "blocked-rejected",
        "the connection is refused",
        "the port is open on that host, but the connection is refused: a firewall rejects it",
    ),
    Problem.PROHIBITED: (
        "blocked-prohibited",
        "the connection is prohibited",
        "a firewall on that host or on the path prohibits the connection (ICMP)",
    ),
    Problem.ABSENT: (
        "host-absent",
        "no reply from that address",
        "not even the network adapter answers: the host is off, its cable is disconnected, its "
        "interface is down, or it is on another network",
    ),
    Problem.NO_ROUTE: (
        "no-route",
        "there is no route to it",
        "the host has no interface for this address: the route is missing, or the host is "
        "not connected to this network",
    ),
    Problem.IMPOSTOR: (
        "wrong-machine-answers",
        "another host answers",
        "two hosts use the same address: a cloned virtual machine, a local bridge that exists on "
        "each host, or a manually assigned address",
    ),
}
# By fault: its title, its severity, why it matters, the advice, and the command that shows more.
_FAULTS = {
    LinkFault.CORRUPTS: (
        "corrupted data",
        Status.FAILURE,
        "the data that arrived differs from the data sent, and TCP's checksum did not detect it: a "
        "broken network adapter, memory or switch. Training would continue with wrong numbers",
        "replace the cable, then try another switch port; the counters show which end has errors",
        "sudo ethtool -S {interface} | grep -iE 'err|drop|crc|discard'",
    ),
    LinkFault.STALLS: (
        "large transfers stall, small messages pass",
        Status.FAILURE,
        "connections open and small messages pass, but large transfers stall or are lost: a device "
        "on the path drops large frames (MTU), or a firewall or a VPN stops long transfers. Ranks "
        "would connect, and hang at the first large tensor",
        "lower the MTU of the hosts to what the path carries, or check for a firewall or a VPN that "
        "stops long transfers",
        "",
    ),
    LinkFault.FAR: (
        "high latency",
        Status.WARNING,
        "every collective waits for the longest round trip, many times per step",
        "use hosts that are close to each other, or an interface without a VPN; check the route",
        "ip -br address show dev {interface}",
    ),
    LinkFault.SLOW: (
        "slow",
        Status.WARNING,
        "the gradients of each step cross every link, so the slowest link limits the speed",
        "check for a cable, a switch port or a limit (tc, a VPN, Wi-Fi) that is slower than the rest",
        "sudo ethtool {interface} | grep -iE 'speed|duplex'",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LinkGroup:
    """Bad links with one cause; ``end`` is the host that causes it, if it is one."""

    kind: Blamed
    links: tuple[Link, ...]
    end: End | None = None

    @property
    def text(self) -> str:
        """``the link from node1 to node2``, ``all links to node2``."""
        first = self.links[0]
        name = self.end.name if self.end is not None else ""
        source, target = first.source.name, first.target.name
        texts = {
            Blamed.EVERYTHING: "all links of the group",
            Blamed.END: f"all links of {name}",
            Blamed.INTO: f"all links to {name}",
            Blamed.OUT_OF: f"all links from {name}",
            Blamed.LINK: f"the link between {source} and {target}",
            Blamed.DIRECTION: f"the link from {source} to {target}",
        }
        return texts[self.kind]

    @property
    def suspects(self) -> list[End]:
        """The hosts to check: the one that causes it, or all ends of the links."""
        return [self.end] if self.end is not None else self.ends

    @property
    def ends(self) -> list[End]:
        """All hosts of the links."""
        ends: dict[int, End] = {}
        for link in self.links:
            ends.setdefault(link.source.place, link.source)
            ends.setdefault(link.target.place, link.target)
        return list(ends.values())

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts to check."""
        return tuple(end.name for end in self.suspects)


def grouped(bad: Sequence[Link], links: Sequence[Link]) -> list[LinkGroup]:
    """Group the bad links among all known ones so that as few causes as possible are named."""
    known, wrong = by_places(links), by_places(bad)
    ends = {}
    for link in links:
        ends[link.source.place], ends[link.target.place] = link.source, link.target
    groups = []
    for cause in blame(wrong.keys(), known.keys()):
        members = tuple(wrong[direction] for direction in cause.directions)
        end = None if cause.end is None else ends[cause.end]
        groups.append(LinkGroup(kind=cause.kind, links=members, end=end))
    return groups


def judge_links(links: Sequence[Link], *, both_ways: bool = True) -> list[Finding]:
    """Return the findings about the links, worst first; empty if all links are healthy.

    ``both_ways`` is for NCCL, which connects in both directions; gloo needs only one per pair.
    """
    ends = {}
    for link in links:
        ends[link.source.place], ends[link.target.place] = link.source, link.target
    findings: list[Finding] = []
    for end in ends.values():
        findings += end.findings
    findings += _blocked_findings(links, both_ways)
    findings += _not_tried_findings(links)
    findings += _quality_findings(links)
    return worst_first(findings)


def _not_tried_findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for links that were not tested, unless findings of the hosts explain it."""
    names: dict[str, None] = {}
    for link in links:
        own = (*link.source.findings, *link.target.findings)
        explained = any(finding.status is Status.FAILURE for finding in own)
        if link.problem == Problem.NOT_TRIED and not explained:
            names[link.source.name] = None
    if not names:
        return []
    not_tried = finding("links-not-tried", hosts=tuple(names), names=name_several(list(names)))
    return [not_tried]


# ---- links that do not connect


def _blocked_findings(links: Sequence[Link], both_ways: bool) -> list[Finding]:
    """Return a finding for each reason why hosts do not reach each other."""
    causes = _without_consequences(links)
    findings = []
    for problem in _CAUSES:
        by_scope: dict[Scope, list[Link]] = {scope: [] for scope in Scope}
        for link in causes:
            if link.problem == problem:
                scope = Scope.RANKS if link.meeting_problem == "" else Scope.ALL
                by_scope[scope].append(link)
            elif not link.problem and link.meeting_problem == problem:
                by_scope[Scope.RENDEZVOUS].append(link)
        for scope, bad in by_scope.items():
            for group in grouped(bad, links):
                findings.append(_blocked(group, problem, scope, links, both_ways))
    return findings


def _without_consequences(links: Sequence[Link]) -> list[Link]:
    """Drop links whose problem is a consequence, and mark a dead link dead in both directions."""
    known = by_places(links)
    causes = []
    for link in links:
        reverse = (link.target.place, link.source.place)
        back = known[reverse].problem if reverse in known else ""
        follows = link.problem in _CONSEQUENCES.get(Problem(back), ())
        # If both directions have the same problem, keep one.
        if follows and not (link.problem == back and link.places < reverse):
            continue
        if link.problem == Problem.TIMEOUT and back == Problem.ABSENT:
            link = replace(link, problem=Problem.ABSENT)
        causes.append(link)
    return causes


def gloo_uses(link: Link) -> bool:
    """Return whether gloo connects in this direction of a link."""
    if link.source.address is None or link.target.address is None:
        return True
    source, target = (
        reach.NodeAddress(name=end.name, system=end.system, address=end.address or "")
        for end in (link.source, link.target)
    )
    return reach.gloo_calls(source, target)


def _blocked(
    group: LinkGroup, problem: Problem, scope: Scope, links: Sequence[Link], both_ways: bool
) -> Finding:
    name, short, why = _CAUSES[problem]
    port = group.links[0].target.meeting_port
    where, fix = "", _fix(group, problem, scope)
    # gloo needs only one direction of each link, NCCL needs both.
    needed = both_ways or any(gloo_uses(link) for link in group.links)
    match scope:
        case Scope.RENDEZVOUS:
            name, needed = "meeting-port-blocked", True
            where = f" on the rendezvous port {port}, only on others"
            why += ". The ranks could not rendezvous"
        case Scope.RANKS:
            name, where = "data-ports-blocked", f" except on the rendezvous port {port}"
            why += ". Ranks connect on ephemeral ports; an open rendezvous port is not enough"
        case Scope.ALL:
            addresses = {link.target.address for link in group.links}
            if len(addresses) == 1:
                where = f" at {group.links[0].target.address}"
            known = by_places(links)
            backs = [known.get((link.target.place, link.source.place)) for link in group.links]
            if group.kind in (Blamed.DIRECTION, Blamed.INTO, Blamed.OUT_OF):
                if all(back is not None and not back.problem for back in backs):
                    short += "; the other direction works"
            elif problem is Problem.TIMEOUT:
                # Without a reply in either direction, two firewalls and a dead cable look the same.
                short = "nothing passes in either direction"
                why = (
                    "there is no reply: either a firewall on each side drops the packets silently, "
                    "or the path between them (a cable, a switch, a VLAN) is broken"
                )
                fix += f"\n{_bring_up(group)}"
    return Finding(
        name=name,
        status=Status.FAILURE if needed else Status.WARNING,
        what=f"{_not_reached(group)}{where}: {short}",
        why=why,
        fix=fix,
        evidence=_evidence([_tried(link) for link in group.links]),
        hosts=group.hosts if scope is Scope.ALL else (group.links[0].target.name,),
    )


def _not_reached(group: LinkGroup) -> str:
    first = group.links[0]
    name = group.end.name if group.end is not None else ""
    source, target = first.source.name, first.target.name
    texts = {
        Blamed.EVERYTHING: "no host reaches another",
        Blamed.END: f"{name} and the other hosts do not reach each other",
        Blamed.INTO: f"no other host reaches {name}",
        Blamed.OUT_OF: f"{name} reaches no other host",
        Blamed.LINK: f"{source} and {target} do not reach each other",
        Blamed.DIRECTION: f"{source} does not reach {target}",
    }
    return texts[group.kind]


def _fix(group: LinkGroup, problem: Problem, scope: Scope) -> str:
    if problem is Problem.ABSENT:
        return _bring_up(group)
    if problem is Problem.IMPOSTOR:
        return (
            "give each host its own address; on each, check which addresses it has:\nip -br address"
        )
    parts = []
    if problem is Problem.NO_ROUTE:
        for source in {link.source.place for link in group.links}:
            parts.append(_route([link for link in group.links if link.source.place == source]))
        return "\n".join(parts)
    for target in {link.target.place: link.target for link in group.links}.values():
        links = [link for link in group.links if link.target.place == target.place]
        ports: list[int | tuple[int, int]] = []
        if target.meeting_port is not None and scope is not Scope.RANKS:
            ports.append(target.meeting_port)
        if scope is not Scope.RENDEZVOUS:
            ports.append(target.given_out_ports)
        parts.append(_open_ports(target, links, ports))
    return "\n".join(parts)


def _open_ports(target: End, links: Sequence[Link], ports: Sequence[int | tuple[int, int]]) -> str:
    """Return the commands that open ports of a host to the addresses of others."""
    callers = [link.source for link in links]
    sources = list(dict.fromkeys(caller.address for caller in callers))
    if len(sources) > _LINES_SHOWN and target.network:
        sources = [target.network]
    lines = [f"allow {name_several([caller.name for caller in callers])} on {target.name}:"]
    for source in sources:
        for port in ports:
            lines.append(firewall.open_command(target.system, port, source=source))
    return "\n".join(lines)


def _route(links: Sequence[Link]) -> str:
    """Return the commands that give the common source of these links a route to their targets."""
    source, first = links[0].source, links[0].target
    if source.network is None or source.network != first.network:
        return (
            f"connect {source.name} to the network {first.network or 'of the others'} (it has "
            f"{source.address}), or add a route through a router; on {source.name}:\n"
            f"ip route get {first.address}"
        )
    destination = source.network
    if len(links) == 1:  # a wrong route to a single host precedes one to the whole network
        destination = str(ipaddress.ip_network(first.address or ""))
    return f"on {source.name}:\nsudo ip route replace {destination} dev {source.interface}"


def _bring_up(group: LinkGroup) -> str:
    lines = []
    for end in group.suspects:
        interface = end.interface or "eth0"
        lines.append(f"check the link of {end.name}, and bring it up; on {end.name}:")
        lines.append(f"ip -br link show dev {interface}")
        lines.append(f"sudo ip link set dev {interface} up")
    return "\n".join(lines)


def _tried(link: Link) -> str:
    tried = f"{link.name} at {link.target.address}:{link.port}: {link.problem or 'reached'}"
    if link.meeting_problem is not None:
        tried += f", port {link.target.meeting_port}: {link.meeting_problem or 'reached'}"
    return f"{tried}, after {link.seconds:.1f} s"


def _evidence(lines: Sequence[str]) -> str:
    shown = list(lines[:_LINES_SHOWN])
    if len(lines) > _LINES_SHOWN:
        shown.append(f"and {len(lines) - _LINES_SHOWN:,} more")
    return "\n".join(shown)


# ---- links that connect, but are bad


def _faulty(links: Sequence[Link]) -> dict[LinkFault, list[Link]]:
    """Return the measured links by their fault; a pair is reported once, with its worst fault."""
    measured = [link for link in links if link.tries]
    rates, trips = {}, []
    for link in measured:
        if link.figures is not None:
            rates[link.places] = min(link.figures.bytes_per_s or 0.0, _FAST_BYTES_PER_S)
            trips.append(link.figures.round_trip_s or 0.0)
    usual_rate = statistics.median(rates.values()) if rates else 0.0
    usual_trip_s = statistics.median(trips) if trips else 0.0
    faulty: dict[LinkFault, list[Link]] = {fault: [] for fault in LinkFault}
    for link in measured:
        back = rates.get((link.target.place, link.source.place), 0.0)
        fault = fault_of(link, max(usual_rate, back), usual_trip_s)
        if fault is not None:
            faulty[fault].append(link)
    reported: set[frozenset[int]] = set()
    for fault, bad in faulty.items():
        faulty[fault] = [link for link in bad if frozenset(link.places) not in reported]
        reported |= {frozenset(link.places) for link in bad}
    return faulty


def fault_of(link: Link, usual_bytes_per_s: float, usual_round_trip_s: float) -> LinkFault | None:
    """Return the worst fault of a measured link; None if it has none."""
    figures = link.figures
    if figures is not None and figures.wrong_bytes > 0:
        return LinkFault.CORRUPTS
    if figures is None or figures.stalled:
        return LinkFault.STALLS
    trip_s, rate = figures.round_trip_s or 0.0, figures.bytes_per_s or 0.0
    if trip_s > FAR_S or trip_s > max(_NEAR_S, _TIMES_FARTHER * usual_round_trip_s):
        return LinkFault.FAR
    # The speed that the link could have had on idle hosts, at most.
    possible = rate / (1 - min(figures.waited_share, _MOST_WAITING))
    slow_anywhere = rate < SLOW_BYTES_PER_S and possible < _TIMES_SLOWER * SLOW_BYTES_PER_S
    if slow_anywhere or possible < usual_bytes_per_s / _TIMES_SLOWER:
        return LinkFault.SLOW
    return None


def suspects(links: Sequence[Link]) -> list[tuple[int, int]]:
    """Return the pairs to measure again: a busy host may be the only cause."""
    pairs = set()
    for bad in _faulty(links).values():
        pairs |= {(min(link.places), max(link.places)) for link in bad}
    return sorted(pairs)


def _quality_findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for each fault of measured links and each host that causes it."""
    findings = []
    measured = [link for link in links if link.tries]
    for fault, bad in _faulty(links).items():
        title, status, why, advice, command = _FAULTS[fault]
        for group in grouped(bad, measured):
            fix = f"{advice}\n{_at_each(group.suspects, command)}"
            if fault is LinkFault.STALLS:
                fix = f"{advice}\n{_lower_the_mtu(group)}"
            elif fault is LinkFault.FAR:
                fix += f"\nip route get {group.links[0].target.address}"
            lines = [f"{link.name}: {_figures(link)}" for link in group.links]
            findings.append(
                Finding(
                    name=fault.value,
                    status=status,
                    what=f"{title}: {group.text}: {_figures(group.links[0])}",
                    why=why,
                    fix=fix,
                    evidence=_evidence(lines),
                    hosts=group.hosts,
                )
            )
    return findings


def _figures(link: Link) -> str:
    figures = link.figures
    if figures is None:
        return f"could not be measured in {link.tries} tries"
    if figures.wrong_bytes:
        return f"{figures.wrong_bytes:,} bytes were wrong"
    if figures.stalled:
        return f"no data passed in {STALLED_S:g} s"
    rate, trip_s = figures.bytes_per_s or 0.0, figures.round_trip_s or 0.0
    return f"{rate * 8 / 1e6:,.0f} Mbit/s, {1000 * trip_s:.3g} ms round trip"


def _at_each(ends: Sequence[End], command: str) -> str:
    lines = []
    for end in ends:
        lines.append(f"on {end.name}:\n{command.format(interface=end.interface)}")
    return "\n".join(lines)


def _lower_the_mtu(group: LinkGroup) -> str:
    """Return the commands for the ends with large frames; for all ends, if none has."""
    large = [end for end in group.ends if (end.mtu_bytes or 0) > _USUAL_MTU]
    size = _USUAL_MTU if large else _TUNNEL_MTU
    return _at_each(large or group.ends, f"sudo ip link set dev {{interface}} mtu {size}")
