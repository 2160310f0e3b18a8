"""What the links between machines come to: findings, each with its direction and what mends it."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.diagnose.links import quality
from torchmuster.diagnose.links.culprits import LinkGroup, grouped
from torchmuster.diagnose.links.model import NOT_TRIED, End, Link, by_places
from torchmuster.finding import Finding, Status, worst_first
from torchmuster.launch.network import firewall, reach
from torchmuster.launch.network.reach import name_several

_LINES_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """What a try that ended so means: the fault's name, in a few words, and in more."""

    name: str
    words: str
    why: str


_CAUSES = {
    "timeout": _Cause(
        name="blocked-dropped",
        words="its packets are dropped",
        why="nothing comes back: a firewall drops what arrives and says nothing",
    ),
    "refused": _Cause(
        name="blocked-rejected",
        words="it is refused",
        why="the port is open on that machine, and the connection is refused: a firewall rejects it",
    ),
    "prohibited": _Cause(
        name="blocked-prohibited",
        words="it is prohibited",
        why="a firewall, there or on the way, answers at once that this is not allowed",
    ),
    "absent": _Cause(
        name="host-absent",
        words="nobody answers at that address",
        why="not even the network card answers: the machine is off, its cable is out, its interface is "
        "down, or it is on another network",
    ),
    "no-route": _Cause(
        name="no-route",
        words="it has no route to it",
        why="the machine does not know through which interface to send: the route is missing, or it "
        "is not connected to this network",
    ),
    "impostor": _Cause(
        name="wrong-machine-answers",
        words="another machine answers",
        why="the same address is in use twice: a copied virtual machine, a bridge that each machine "
        "has for itself, or an address that was given by hand",
    ),
}
# Without an answer in either direction nobody can tell two firewalls from a dead cable.
_SILENT_BOTH_WAYS = _Cause(
    name="blocked-dropped",
    words="nothing passes in either direction",
    why="nothing comes back: either a firewall on each side drops what arrives and says nothing, or "
    "what is between them (a cable, a switch, a VLAN) carries nothing",
)
# What is also seen on the way back when the way there has one of these causes.
_CONSEQUENCES = {
    "no-route": {"timeout", "absent"},
    "impostor": {"timeout", "absent", "refused", "impostor"},
}


def blocked_findings(links: Sequence[Link], *, both_ways: bool) -> list[Finding]:
    """Return a finding for each reason why machines do not reach each other."""
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
        found += [_judge_data(group, problem, both_ways) for group in grouped(only_data, links)]
        found += [_all(group, problem, links, both_ways) for group in grouped(every, links)]
    return [*found, *_not_tried(links)]


def _not_tried(links: Sequence[Link]) -> list[Finding]:
    """Say what could not be found out, unless what is known of the machines explains it."""
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
            what=f"{name_several(names)} did not try to reach the others, or did not say how it went",
            why="the machine did not answer in time, or its examiner ended",
            fix="muster check  # once more",
        )
    ]


def _is_broken(end: End) -> bool:
    return any(one.status is Status.FAILURE for one in end.findings)


def _told_apart(links: Sequence[Link]) -> list[Link]:
    """Leave out what is only a consequence, and call a dead link dead in both directions."""
    known = by_places(links)
    kept = []
    for link in links:
        back = known.get((link.target.place, link.source.place))
        other = back.problem if back is not None else ""
        if link.problem in _CONSEQUENCES.get(other, ()) and not (
            # Of two that see the same, one has to stay.
            link.problem == other and link.places < (link.target.place, link.source.place)
        ):
            continue
        if link.problem == "timeout" and other == "absent":
            link = replace(link, problem="absent")
        kept.append(link)
    return kept


def _status(group: LinkGroup, both_ways: bool) -> Status:
    """Gloo needs one direction of each link only; NCCL needs both."""
    needed = both_ways or any(
        reach.gloo_calls(_judge_place(one.source), _judge_place(one.target)) for one in group.links
    )
    return Status.FAILURE if needed else Status.WARNING


def _judge_place(end: End) -> reach.NodeAddress:
    return reach.NodeAddress(name=end.name, system=end.system, address=end.address or "0.0.0.0")  # noqa: S104


def _meeting(group: LinkGroup, problem: str) -> Finding:
    target = group.links[0].target
    callers = [one.source for one in group.links]
    port = target.meeting_port
    assert port is not None
    return Finding(
        name="meeting-port-blocked",
        status=Status.FAILURE,
        what=f"{_not_reached(group)} at the meeting port {port}, only at others: "
        f"{_CAUSES[problem].words}",
        why=f"{_CAUSES[problem].why}. The ranks would wait there for each other",
        fix=_let_in(target, callers, [port]),
        evidence=_judge_evidence(group.links, port),
    )


def _judge_data(group: LinkGroup, problem: str, both_ways: bool) -> Finding:
    target = group.links[0].target
    return Finding(
        name="data-ports-blocked",
        status=_status(group, both_ways),
        what=f"{_not_reached(group)} except at the meeting port {target.meeting_port}: "
        f"{_CAUSES[problem].words}",
        why=f"{_CAUSES[problem].why}. Ranks connect at ports that the system gives out; the meeting "
        "port is not enough",
        fix=_let_in(target, [one.source for one in group.links], [target.given_out_ports]),
        evidence=_judge_evidence(group.links),
    )


def _all(group: LinkGroup, problem: str, links: Sequence[Link], both_ways: bool) -> Finding:
    silent = problem == "timeout" and group.kind in ("between", "of", "everywhere")
    cause = _SILENT_BOTH_WAYS if silent else _CAUSES[problem]
    known = by_places(links)
    backs = [known.get((one.target.place, one.source.place)) for one in group.links]
    one_way = group.kind in ("from", "into", "out of") and all(
        back is not None and not back.problem for back in backs
    )
    remark = "; the other direction works" if one_way else ""
    return Finding(
        name=cause.name,
        status=_status(group, both_ways),
        what=f"{_not_reached(group)}{_at(group)}: {cause.words}{remark}",
        why=cause.why,
        fix=_fix_judge(group, problem) + (f"\n{_looks(group)}" if silent else ""),
        evidence=_judge_evidence(group.links),
    )


def _not_reached(group: LinkGroup) -> str:
    first = group.links[0]
    if group.kind == "into" and group.end:
        return f"no other machine reaches {group.end.name}"
    if group.kind == "out of" and group.end:
        return f"{group.end.name} reaches no other machine"
    if group.kind == "of" and group.end:
        return f"{group.end.name} and the other machines do not reach each other"
    if group.kind == "everywhere":
        return "no machine reaches another"
    if group.kind == "between":
        return f"{first.source.name} and {first.target.name} do not reach each other"
    return f"{first.source.name} does not reach {first.target.name}"


def _at(group: LinkGroup) -> str:
    addresses = {one.target.address for one in group.links}
    only = addresses.pop()
    return f" at {only}" if not addresses and only else ""


def _fix_judge(group: LinkGroup, problem: str) -> str:
    if problem == "no-route":
        sources = dict.fromkeys(one.source.place for one in group.links)
        return "\n".join(
            _route([one for one in group.links if one.source.place == place]) for place in sources
        )
    if problem == "absent":
        return _looks(group)
    if problem == "impostor":
        return "give each machine an address of its own; see which ones have it, on each:\nip -br address"
    lines = []
    for target in {one.target.place: one.target for one in group.links}.values():
        callers = [one.source for one in group.links if one.target.place == target.place]
        ports: list[int | tuple[int, int]] = [target.given_out_ports]
        if target.meeting_port is not None:
            ports.insert(0, target.meeting_port)
        lines.append(_let_in(target, callers, ports))
    return "\n".join(lines)


def _let_in(target: End, callers: Sequence[End], ports: Sequence[int | tuple[int, int]]) -> str:
    """Return the commands that open ports of a machine to others, each named by its address."""
    sources = list(dict.fromkeys(one.address for one in callers))
    if len(sources) > _LINES_SHOWN and target.network:
        sources = [target.network]
    commands = [
        firewall.open_command(target.system, port, source=source)
        for source in sources
        for port in ports
    ]
    return f"let {name_several([one.name for one in callers])} in at {target.name}:\n" + "\n".join(
        commands
    )


def _route(links: Sequence[Link]) -> str:
    """Return what gives the source of all these a way to their targets."""
    source, first = links[0].source, links[0].target
    if source.network is None or source.network != first.network:
        return (
            f"connect {source.name} to the network {first.network or 'of the others'} (it has "
            f"{source.address}), or let a router lead there; on {source.name}:\n"
            f"ip route get {first.address}"
        )
    # A wrong route to a single machine stays in force beside one to the whole network.
    only = str(ipaddress.ip_network(first.address or ""))
    where = source.network if len(links) > 1 else only
    return f"on {source.name}:\nsudo ip route replace {where} dev {source.interface}"


def _looks(group: LinkGroup) -> str:
    return "\n".join(_look_at(end) for end in group.suspects)


def _look_at(end: End) -> str:
    interface = end.interface or "eth0"
    return (
        f"see whether {end.name} has a link, and bring it up; on {end.name}:\n"
        f"ip -br link show dev {interface}\nsudo ip link set dev {interface} up"
    )


def _judge_evidence(links: Sequence[Link], port: int | None = None) -> str:
    lines = []
    for one in links[:_LINES_SHOWN]:
        where = f"{one.name} at {one.target.address}"
        if port is None:
            lines.append(f"{where}:{one.port}: {one.problem} after {one.seconds:.1f} s")
        else:
            lines.append(f"{where}:{port}: {one.meeting_problem}; at port {one.port}: reached")
    if len(links) > _LINES_SHOWN:
        lines.append(f"and {len(links) - _LINES_SHOWN:,} more")
    return "\n".join(lines)


def judge_links(links: Sequence[Link], *, both_ways: bool = True) -> list[Finding]:
    """Return what is worth saying about the links, worst first; nothing if all is well.

    ``both_ways`` is for NCCL, which calls in both directions; gloo needs one of each pair only.
    """
    ends = {end.place: end for link in links for end in (link.source, link.target)}
    own = [finding for end in ends.values() for finding in end.findings]
    found = [*own, *blocked_findings(links, both_ways=both_ways), *quality.quality_findings(links)]
    return worst_first(found)
