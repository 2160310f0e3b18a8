"""Turn measured links between hosts into findings, each with its direction and its fix."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.diagnose.blame import Blamed
from torchmuster.diagnose.links import quality
from torchmuster.diagnose.links.groups import LinkGroup, grouped
from torchmuster.diagnose.links.model import NOT_TRIED, End, Link, by_places
from torchmuster.finding import Finding, Status, worst_first
from torchmuster.launch.network import firewall, reach
from torchmuster.units import name_several

_LINES_SHOWN = 4
# Problems of the reverse direction that follow from these causes.
_CONSEQUENCES = {
    "no-route": {"timeout", "absent"},
    "impostor": {"timeout", "absent", "refused", "impostor"},
}


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """The meaning of a failed connection: the finding's name, a short text and an explanation."""

    name: str
    words: str
    why: str


_CAUSES = {
    "timeout": _Cause(
        name="blocked-dropped",
        words="its packets are dropped",
        why="there is no reply: a firewall drops the packets silently",
    ),
    "refused": _Cause(
        name="blocked-rejected",
        words="the connection is refused",
        why="the port is open on that host, but the connection is refused: a firewall rejects it",
    ),
    "prohibited": _Cause(
        name="blocked-prohibited",
        words="the connection is prohibited",
        why="a firewall on that host or on the path prohibits the connection (ICMP)",
    ),
    "absent": _Cause(
        name="host-absent",
        words="no reply from that address",
        why="not even the network adapter answers: the host is off, its cable is disconnected, its "
        "interface is down, or it is on another network",
    ),
    "no-route": _Cause(
        name="no-route",
        words="there is no route to it",
        why="the host has no interface for this address: the route is missing, or the host is "
        "not connected to this network",
    ),
    "impostor": _Cause(
        name="wrong-machine-answers",
        words="another host answers",
        why="two hosts use the same address: a cloned virtual machine, a local bridge that exists on "
        "each host, or a manually assigned address",
    ),
}
# Without a reply in either direction, two firewalls and a dead cable look the same.
_SILENT_BOTH_WAYS = _Cause(
    name="blocked-dropped",
    words="nothing passes in either direction",
    why="there is no reply: either a firewall on each side drops the packets silently, or the path "
    "between them (a cable, a switch, a VLAN) is broken",
)


def blocked_findings(links: Sequence[Link], *, both_ways: bool) -> list[Finding]:
    """Return a finding for each reason why hosts do not reach each other."""
    causes = _told_apart(links)
    meeting = [one for one in causes if one.meeting_problem is not None]
    found: list[Finding] = []
    for problem in _CAUSES:
        only_meeting = [
            one for one in meeting if not one.problem and one.meeting_problem == problem
        ]
        only_data = [one for one in meeting if one.problem == problem and not one.meeting_problem]
        every = [one for one in causes if one.problem == problem and one.meeting_problem != ""]
        found += [_meeting(group, problem) for group in grouped(only_meeting, links)]
        found += [_data(group, problem, both_ways) for group in grouped(only_data, links)]
        found += [_all(group, problem, links, both_ways) for group in grouped(every, links)]
    return [*found, *_not_tried(links)]


def _not_tried(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for links that were not tested, unless findings of the hosts explain it."""
    missing = [
        one
        for one in links
        if one.problem == NOT_TRIED and not (_is_broken(one.source) or _is_broken(one.target))
    ]
    names = list(dict.fromkeys(one.source.name for one in missing))
    if not names:
        return []
    return [
        Finding(
            name="links-not-tried",
            status=Status.WARNING,
            what=f"{name_several(names)} did not report on connections to the others",
            why="the host did not answer in time, or its probe program exited",
            fix="muster check  # run it again",
            hosts=tuple(names),
        )
    ]


def _is_broken(end: End) -> bool:
    return any(one.status is Status.FAILURE for one in end.findings)


def _told_apart(links: Sequence[Link]) -> list[Link]:
    """Drop links whose problem is a consequence, and mark a dead link dead in both directions."""
    known = by_places(links)
    kept = []
    for link in links:
        back = known.get((link.target.place, link.source.place))
        other = back.problem if back is not None else ""
        if link.problem in _CONSEQUENCES.get(other, ()) and not (
            # If both directions have the same problem, keep one.
            link.problem == other and link.places < (link.target.place, link.source.place)
        ):
            continue
        if link.problem == "timeout" and other == "absent":
            link = replace(link, problem="absent")
        kept.append(link)
    return kept


def _status(group: LinkGroup, both_ways: bool) -> Status:
    """Return the severity: gloo needs only one direction of each link, NCCL needs both."""
    needed = both_ways or any(
        reach.gloo_calls(_place(one.source), _place(one.target)) for one in group.links
    )
    return Status.FAILURE if needed else Status.WARNING


def _place(end: End) -> reach.NodeAddress:
    return reach.NodeAddress(name=end.name, system=end.system, address=end.address or "0.0.0.0")  # noqa: S104


def _meeting(group: LinkGroup, problem: str) -> Finding:
    target = group.links[0].target
    callers = [one.source for one in group.links]
    port = target.meeting_port
    assert port is not None
    return Finding(
        name="meeting-port-blocked",
        status=Status.FAILURE,
        what=f"{_not_reached(group)} on the rendezvous port {port}, only on others: "
        f"{_CAUSES[problem].words}",
        why=f"{_CAUSES[problem].why}. The ranks could not rendezvous",
        fix=_let_in(target, callers, [port]),
        evidence=_evidence(group.links, port),
        hosts=(target.name,),
    )


def _data(group: LinkGroup, problem: str, both_ways: bool) -> Finding:
    target = group.links[0].target
    return Finding(
        name="data-ports-blocked",
        status=_status(group, both_ways),
        what=f"{_not_reached(group)} except on the rendezvous port {target.meeting_port}: "
        f"{_CAUSES[problem].words}",
        why=f"{_CAUSES[problem].why}. Ranks connect on ephemeral ports; an open rendezvous port is "
        "not enough",
        fix=_let_in(target, [one.source for one in group.links], [target.given_out_ports]),
        evidence=_evidence(group.links),
        hosts=(target.name,),
    )


def _all(group: LinkGroup, problem: str, links: Sequence[Link], both_ways: bool) -> Finding:
    silent = problem == "timeout" and group.kind in (Blamed.LINK, Blamed.END, Blamed.EVERYTHING)
    cause = _SILENT_BOTH_WAYS if silent else _CAUSES[problem]
    known = by_places(links)
    backs = [known.get((one.target.place, one.source.place)) for one in group.links]
    one_way = group.kind in (Blamed.DIRECTION, Blamed.INTO, Blamed.OUT_OF) and all(
        back is not None and not back.problem for back in backs
    )
    remark = "; the other direction works" if one_way else ""
    return Finding(
        name=cause.name,
        status=_status(group, both_ways),
        what=f"{_not_reached(group)}{_at(group)}: {cause.words}{remark}",
        why=cause.why,
        fix=_fix(group, problem) + (f"\n{_looks(group)}" if silent else ""),
        evidence=_evidence(group.links),
        hosts=group.hosts,
    )


def _not_reached(group: LinkGroup) -> str:
    first = group.links[0]
    if group.kind is Blamed.INTO and group.end:
        return f"no other host reaches {group.end.name}"
    if group.kind is Blamed.OUT_OF and group.end:
        return f"{group.end.name} reaches no other host"
    if group.kind is Blamed.END and group.end:
        return f"{group.end.name} and the other hosts do not reach each other"
    if group.kind is Blamed.EVERYTHING:
        return "no host reaches another"
    if group.kind is Blamed.LINK:
        return f"{first.source.name} and {first.target.name} do not reach each other"
    return f"{first.source.name} does not reach {first.target.name}"


def _at(group: LinkGroup) -> str:
    addresses = {one.target.address for one in group.links}
    only = addresses.pop()
    return f" at {only}" if not addresses and only else ""


def _fix(group: LinkGroup, problem: str) -> str:
    if problem == "no-route":
        sources = dict.fromkeys(one.source.place for one in group.links)
        return "\n".join(
            _route([one for one in group.links if one.source.place == place]) for place in sources
        )
    if problem == "absent":
        return _looks(group)
    if problem == "impostor":
        return (
            "give each host its own address; on each, check which addresses it has:\nip -br address"
        )
    lines = []
    for target in {one.target.place: one.target for one in group.links}.values():
        callers = [one.source for one in group.links if one.target.place == target.place]
        ports: list[int | tuple[int, int]] = [target.given_out_ports]
        if target.meeting_port is not None:
            ports.insert(0, target.meeting_port)
        lines.append(_let_in(target, callers, ports))
    return "\n".join(lines)


def _let_in(target: End, callers: Sequence[End], ports: Sequence[int | tuple[int, int]]) -> str:
    """Return the commands that open ports of a host to the addresses of others."""
    sources = list(dict.fromkeys(one.address for one in callers))
    if len(sources) > _LINES_SHOWN and target.network:
        sources = [target.network]
    commands = [
        firewall.open_command(target.system, port, source=source)
        for source in sources
        for port in ports
    ]
    return f"allow {name_several([one.name for one in callers])} on {target.name}:\n" + "\n".join(
        commands
    )


def _route(links: Sequence[Link]) -> str:
    """Return the commands that give the common source of these links a route to their targets."""
    source, first = links[0].source, links[0].target
    if source.network is None or source.network != first.network:
        return (
            f"connect {source.name} to the network {first.network or 'of the others'} (it has "
            f"{source.address}), or add a route through a router; on {source.name}:\n"
            f"ip route get {first.address}"
        )
    # A wrong route to a single host takes precedence over one to the whole network.
    only = str(ipaddress.ip_network(first.address or ""))
    where = source.network if len(links) > 1 else only
    return f"on {source.name}:\nsudo ip route replace {where} dev {source.interface}"


def _looks(group: LinkGroup) -> str:
    return "\n".join(_look_at(end) for end in group.suspects)


def _look_at(end: End) -> str:
    interface = end.interface or "eth0"
    return (
        f"check the link of {end.name}, and bring it up; on {end.name}:\n"
        f"ip -br link show dev {interface}\nsudo ip link set dev {interface} up"
    )


def _evidence(links: Sequence[Link], port: int | None = None) -> str:
    lines = []
    for one in links[:_LINES_SHOWN]:
        where = f"{one.name} at {one.target.address}"
        if port is None:
            lines.append(f"{where}:{one.port}: {one.problem} after {one.seconds:.1f} s")
        else:
            lines.append(f"{where}:{port}: {one.meeting_problem}; port {one.port}: reached")
    if len(links) > _LINES_SHOWN:
        lines.append(f"and {len(links) - _LINES_SHOWN:,} more")
    return "\n".join(lines)


def judge_links(links: Sequence[Link], *, both_ways: bool = True) -> list[Finding]:
    """Return the findings about the links, worst first; empty if all links are healthy.

    ``both_ways`` is for NCCL, which connects in both directions; gloo needs only one per pair.
    """
    ends = {end.place: end for link in links for end in (link.source, link.target)}
    own = [finding for end in ends.values() for finding in end.findings]
    found = [*own, *blocked_findings(links, both_ways=both_ways), *quality.quality_findings(links)]
    return worst_first(found)
