"""Turn measured links between hosts into findings, each with its direction and its fix."""

import ipaddress
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.diagnose.blame import Blamed, blame
from torchmuster.diagnose.links.call import STALLED_S
from torchmuster.diagnose.links.model import (
    End,
    Figures,
    Link,
    LinkFault,
    Problem,
    Scope,
    by_places,
)
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status, worst_first
from torchmuster.launch.network import firewall
from torchmuster.units import name_several

# Slower than the first slows any training; faster than the second cannot be measured reliably.
SLOW_BYTES_PER_S, _FAST_BYTES_PER_S = 250e6 / 8, 0.5e9
_TIMES_SLOWER = 4
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
    LinkFault.SLOW: (
        "slow",
        Status.WARNING,
        "the gradients of each step cross every link, so the slowest link limits the speed",
        "check for a cable, a switch port or a limit (tc, a VPN, Wi-Fi) that is slower than the rest; "
        "if the round trip is long, use hosts that are close to each other",
        "sudo ethtool {interface} | grep -iE 'speed|duplex'\nip -br address show dev {interface}",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LinkGroup:
    """Bad links with one cause; ``end`` is the host that causes it, if it is one."""

    kind: Blamed
    links: tuple[Link, ...]
    end: End | None = None

    @property
    def suspects(self) -> list[End]:
        """The hosts to check: the one that causes it, or all ends of the links."""
        if self.end is not None:
            return [self.end]
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
    ends = {link.source.place: link.source for link in links}
    groups = []
    for cause in blame(wrong.keys(), known.keys()):
        members = tuple(wrong[direction] for direction in cause.directions)
        end = None if cause.end is None else ends[cause.end]
        groups.append(LinkGroup(kind=cause.kind, links=members, end=end))
    return groups


def judge_links(links: Sequence[Link]) -> list[Finding]:
    """Return the findings about the links, worst first; empty if all links are healthy."""
    findings: list[Finding] = []
    for end in {link.source.place: link.source for link in links}.values():
        findings += end.findings
    findings += _blocked_findings(links)
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


def _blocked_findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for each reason why hosts do not reach each other."""
    findings = []
    bad: dict[tuple[Problem, Scope], list[Link]] = {}
    for link in _without_consequences(links):
        scope, problem = Scope.ALL, link.problem
        if not problem and link.rendezvous_problem:
            scope, problem = Scope.RENDEZVOUS, link.rendezvous_problem
        elif link.rendezvous_problem is Problem.NONE:
            scope = Scope.RANKS
        bad.setdefault((problem, scope), []).append(link)
    for (problem, scope), blocked in bad.items():
        if problem in _CAUSES:
            for group in grouped(blocked, links):
                findings.append(_blocked(group, problem, scope, links))
    return findings


def _without_consequences(links: Sequence[Link]) -> list[Link]:
    """Drop links whose problem is a consequence, and mark a dead link dead in both directions."""
    known = by_places(links)
    causes = []
    for link in links:
        reverse = (link.target.place, link.source.place)
        back = known[reverse].problem if reverse in known else Problem.NONE
        follows = link.problem in _CONSEQUENCES.get(back, ())
        # If both directions have the same problem, keep one.
        if follows and not (link.problem == back and link.places < reverse):
            continue
        if link.problem == Problem.TIMEOUT and back == Problem.ABSENT:
            link = replace(link, problem=Problem.ABSENT)
        causes.append(link)
    return causes


def _blocked(group: LinkGroup, problem: Problem, scope: Scope, links: Sequence[Link]) -> Finding:
    name, short, why = _CAUSES[problem]
    target = group.links[0].target
    hosts: tuple[str, ...] = (target.name,)
    where, fix = "", _fix(group, problem, scope)
    if scope is Scope.RENDEZVOUS:
        name = "rendezvous-port-blocked"
        where = f" on the rendezvous port {target.rendezvous_port}, only on others"
        why += ". The ranks could not rendezvous"
    elif scope is Scope.RANKS:
        name, where = (
            "data-ports-blocked",
            f" except on the rendezvous port {target.rendezvous_port}",
        )
        why += ". Ranks connect on ephemeral ports; an open rendezvous port is not enough"
    else:
        hosts = group.hosts
        if len({link.target.address for link in group.links}) == 1:
            where = f" at {target.address}"
        if group.kind in (Blamed.DIRECTION, Blamed.INTO, Blamed.OUT_OF):
            problems = {link.places: link.problem for link in links}
            backs = [problems.get(link.places[::-1], problem) for link in group.links]
            if not any(backs):
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
        status=Status.FAILURE,
        what=f"{_not_reached(group)}{where}: {short}",
        why=why,
        fix=fix,
        evidence=_evidence([_tried(link) for link in group.links]),
        hosts=hosts,
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
        if target.rendezvous_port is not None and scope is not Scope.RANKS:
            ports.append(target.rendezvous_port)
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
    if link.rendezvous_problem is not None:
        tried += f", port {link.target.rendezvous_port}: {link.rendezvous_problem or 'reached'}"
    return f"{tried}, after {link.seconds:.1f} s"


def _evidence(lines: Sequence[str]) -> str:
    shown = list(lines[:_LINES_SHOWN])
    if len(lines) > _LINES_SHOWN:
        shown.append(f"and {len(lines) - _LINES_SHOWN:,} more")
    return "\n".join(shown)


# ---- links that connect, but are bad


def faults_of(links: Sequence[Link]) -> dict[tuple[int, int], LinkFault]:
    """Return the worst fault of each measured link that has one, by the places of its ends."""
    rates = {}
    for link in links:
        if link.figures is not None:
            rates[link.places] = min(link.figures.bytes_per_s or 0.0, _FAST_BYTES_PER_S)
    usual = statistics.median(rates.values()) if rates else 0.0
    faults = {}
    for link in links:
        if link.figures is None:
            continue
        if link.figures.wrong_bytes:
            faults[link.places] = LinkFault.CORRUPTS
        elif link.figures.bytes_per_s is None:
            faults[link.places] = LinkFault.STALLS
        elif rates[link.places] < max(SLOW_BYTES_PER_S, usual / _TIMES_SLOWER):
            faults[link.places] = LinkFault.SLOW
    return faults


def _quality_findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for each fault of measured links and each host that causes it."""
    findings = []
    faults = faults_of(links)
    measured = [link for link in links if link.figures is not None]
    for fault, (title, status, why, advice, command) in _FAULTS.items():
        bad = [link for link in measured if faults.get(link.places) is fault]
        for group in grouped(bad, measured):
            ends = group.suspects
            if fault is LinkFault.STALLS:
                large = [end for end in ends if (end.mtu_bytes or 0) > _USUAL_MTU]
                size = _USUAL_MTU if large else _TUNNEL_MTU
                command, ends = f"sudo ip link set dev {{interface}} mtu {size}", large or ends
            lines = [advice]
            for end in ends:
                lines.append(f"on {end.name}:\n{command.format(interface=end.interface)}")
            measured_lines = []
            for link in group.links:
                if link.source.place < link.target.place:  # both directions have these figures
                    measured_lines.append(f"{link.name}: {_figures(link)}")
            findings.append(
                Finding(
                    name=fault.value,
                    status=status,
                    what=f"{title}: {_linked(group)}: {_figures(group.links[0])}",
                    why=why,
                    fix="\n".join(lines),
                    evidence=_evidence(measured_lines),
                    hosts=group.hosts,
                )
            )
    return findings


def _linked(group: LinkGroup) -> str:
    """``the link between node1 and node2``, ``all links of node2``."""
    if group.end is not None:
        return f"all links of {group.end.name}"
    if group.kind is Blamed.EVERYTHING:
        return "all links of the group"
    first = group.links[0]
    return f"the link between {first.source.name} and {first.target.name}"


def _figures(link: Link) -> str:
    figures = link.figures or Figures()
    if figures.wrong_bytes:
        return f"{figures.wrong_bytes:,} bytes were wrong"
    if figures.bytes_per_s is None:
        return f"no data passed in {STALLED_S:g} s"
    trip_s = figures.round_trip_s or 0.0
    return f"{figures.bytes_per_s * 8 / 1e6:,.0f} Mbit/s, {1000 * trip_s:.3g} ms round trip"
