"""Turn tested links between hosts into findings, each with its direction and its fix."""

import ipaddress
import statistics
from collections.abc import Mapping, Sequence

from torchmuster.diagnose.blame import Blame, Blamed, Direction, blame
from torchmuster.diagnose.links.dial import STALLED_S
from torchmuster.diagnose.links.model import Link, LinkHost, Problem, Speed
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, worst_first
from torchmuster.launch.network import firewall
from torchmuster.units import name_several

# Slower than the first slows any training; faster than the second cannot be measured reliably.
SLOW_BYTES_PER_S, _FAST_BYTES_PER_S = 250e6 / 8, 0.5e9
_TIMES_SLOWER = 4
_LINES_SHOWN = 4
_CORRUPTING, _STALLED, _SLOW = "corrupting-link", "stalled-link", "slow-link"
# If one direction has such a problem, that of the other one follows from it. Worst first.
_BROKEN_PATHS = (Problem.IMPOSTOR, Problem.NO_ROUTE, Problem.ABSENT)
_NAMES = {
    Problem.TIMEOUT: "blocked-dropped",
    Problem.REFUSED: "blocked-rejected",
    Problem.PROHIBITED: "blocked-prohibited",
    Problem.ABSENT: "host-absent",
    Problem.NO_ROUTE: "no-route",
    Problem.IMPOSTOR: "wrong-machine-answers",
}
_RENDEZVOUS_BLOCKED, _DATA_BLOCKED = "rendezvous-port-blocked", "data-ports-blocked"
_SHORT = {
    Problem.TIMEOUT: "its packets are dropped",
    Problem.REFUSED: "the connection is refused",
    Problem.PROHIBITED: "the connection is prohibited",
}


def judge_links(links: Sequence[Link]) -> list[Finding]:
    """Return the findings about the links, worst first; empty if all links are healthy."""
    by_places = {link.places: link for link in links}
    return worst_first([*_blocked(by_places), *_bad_speeds(by_places)])


# ---- links that do not connect


def _blocked(links: Mapping[Direction, Link]) -> list[Finding]:
    """Return a finding for each reason why hosts do not reach each other."""
    bad: dict[tuple[str, Problem], set[Direction]] = {}
    for direction, link in links.items():
        back = links.get(direction[::-1], link)
        problem = _problem_of_both(link.problem, back.problem)
        name = _NAMES.get(problem, "")
        if not problem and link.rendezvous_problem:
            name, problem = _RENDEZVOUS_BLOCKED, link.rendezvous_problem
        elif problem in _SHORT and link.rendezvous_problem is Problem.NONE:
            name = _DATA_BLOCKED
        if name:
            bad.setdefault((name, problem), set()).add(direction)
    findings = []
    for (name, problem), directions in bad.items():
        for cause in blame(directions, links):
            findings.append(_blocked_finding(name, problem, cause, links))
    return findings


def _problem_of_both(problem: Problem, back: Problem) -> Problem:
    """Return the problem of a direction, or that of the path between both ends."""
    for broken in _BROKEN_PATHS:
        if broken in (problem, back):
            return broken
    return problem


def _blocked_finding(
    name: str, problem: Problem, cause: Blame, links: Mapping[Direction, Link]
) -> Finding:
    blocked = [links[direction] for direction in cause.directions]
    hosts = _suspects(cause, links)
    target = blocked[0].target
    if name in (_RENDEZVOUS_BLOCKED, _DATA_BLOCKED):
        hosts = [target]
    at_both_ends = cause.kind in (Blamed.END, Blamed.LINK, Blamed.EVERYTHING)
    key = f"{name}:both" if name == _NAMES[Problem.TIMEOUT] and at_both_ends else name
    addresses = {link.address.address for link in blocked if link.address is not None}
    return finding(
        key,
        hosts=tuple(host.name for host in hosts),
        ends=_ends_text(cause, links),
        where=f" at {addresses.pop()}" if len(addresses) == 1 else "",
        port=target.rendezvous_port,
        problem=_SHORT.get(problem, problem),
        names=name_several([host.name for host in hosts]),
        interface=_interface(hosts),
        routes="\n".join(_route_command(link) for link in blocked[:_LINES_SHOWN]),
        commands=_open_commands(name, blocked) if problem in _SHORT else "",
        evidence=_shortened([_evidence(link) for link in blocked]),
    )


def _suspects(cause: Blame, links: Mapping[Direction, Link]) -> list[LinkHost]:
    """Return the hosts to check: the one that causes it, or all ends of the links."""
    hosts: dict[int, LinkHost] = {}
    for direction in cause.directions:
        for host in (links[direction].source, links[direction].target):
            if cause.end in (None, host.place):
                hosts[host.place] = host
    return list(hosts.values())


def _ends_text(cause: Blame, links: Mapping[Direction, Link]) -> str:
    first = links[cause.directions[0]]
    source, target = first.source.name, first.target.name
    name = _suspects(cause, links)[0].name
    texts = {
        Blamed.EVERYTHING: "no host reaches another",
        Blamed.END: f"{name} and the other hosts do not reach each other",
        Blamed.INTO: f"no other host reaches {name}",
        Blamed.OUT_OF: f"{name} reaches no other host",
        Blamed.LINK: f"{source} and {target} do not reach each other",
        Blamed.DIRECTION: f"{source} does not reach {target}",
    }
    return texts[cause.kind]


def _interface(hosts: Sequence[LinkHost]) -> str:
    """Return the interface of the first of these hosts that has one, for commands."""
    for host in hosts:
        for address in host.addresses:
            return address.interface
    return "eth0"


def _route_command(link: Link) -> str:
    address = link.address.address if link.address is not None else "ADDRESS"
    return f"ip route get {address}  # on {link.source.name}"


def _open_commands(name: str, blocked: Sequence[Link]) -> str:
    """Return the commands that open the blocked ports of each target to the addresses of its callers."""
    lines = []
    for target in {link.target.place: link.target for link in blocked}.values():
        callers = [link for link in blocked if link.target.place == target.place]
        names = name_several([link.source.name for link in callers])
        lines.append(f"allow {names} on {target.name}:")
        ports: list[int | tuple[int, int]] = []
        if target.rendezvous_port is not None and name != _DATA_BLOCKED:
            ports.append(target.rendezvous_port)
        if name != _RENDEZVOUS_BLOCKED:
            ports.append(target.ephemeral_ports)
        for source in _networks([link.source_address for link in callers]):
            for port in ports:
                lines.append(firewall.open_command(target.system, port, source=source))
    return "\n".join(lines)


def _networks(addresses: Sequence[str]) -> list[str]:
    """Return these addresses, or of many the smallest network that contains them all."""
    known = list(dict.fromkeys(address for address in addresses if address))
    if len(known) <= _LINES_SHOWN:
        return known
    network = ipaddress.ip_network(known[0])
    while not all(ipaddress.ip_address(address) in network for address in known):
        network = network.supernet()
    return [str(network)]


def _evidence(link: Link) -> str:
    address = link.address.address if link.address is not None else "no address"
    problem = link.problem or "reached"
    text = f"{link.source.name} to {link.target.name} at {address}:{link.target.port}: {problem}"
    if link.rendezvous_problem is not None:
        text += f", port {link.target.rendezvous_port}: {link.rendezvous_problem or 'reached'}"
    return f"{text}, after {link.seconds:.1f} s"


def _shortened(lines: Sequence[str]) -> str:
    shown = list(lines[:_LINES_SHOWN])
    if len(lines) > _LINES_SHOWN:
        shown.append(f"and {len(lines) - _LINES_SHOWN:,} more")
    return "\n".join(shown)


# ---- links that connect, but are bad


def faults_of(links: Sequence[Link]) -> dict[Direction, str]:
    """Return the worst fault of each measured link that has one, by the places of its ends."""
    speeds: dict[Direction, Speed] = {}
    for link in links:
        if link.speed is not None:
            speeds[link.places] = link.speed
    rates = {}
    for direction, speed in speeds.items():
        rates[direction] = min(speed.bytes_per_s or 0.0, _FAST_BYTES_PER_S)
    usual = statistics.median(rates.values()) if rates else 0.0
    faults = {}
    for direction, speed in speeds.items():
        if speed.wrong_bytes:
            faults[direction] = _CORRUPTING
        elif speed.bytes_per_s is None:
            faults[direction] = _STALLED
        elif rates[direction] < max(SLOW_BYTES_PER_S, usual / _TIMES_SLOWER):
            faults[direction] = _SLOW
    return faults


def _bad_speeds(links: Mapping[Direction, Link]) -> list[Finding]:
    """Return a finding for each fault of measured links and each host that causes it."""
    faults = faults_of(list(links.values()))
    measured = [direction for direction, link in links.items() if link.speed is not None]
    findings = []
    for name in dict.fromkeys(faults.values()):
        bad = [direction for direction, fault in faults.items() if fault == name]
        for cause in blame(bad, measured):
            hosts = _suspects(cause, links)
            names = [host.name for host in hosts]
            ends = f"the link between {name_several(names)}"
            if cause.end is not None:
                ends = f"all links of {names[0]}"
            lines = []
            for low, high in cause.directions:
                link = links[low, high]
                if low < high:  # both directions have this speed
                    lines.append(f"{link.source.name} to {link.target.name}: {_speed_text(link)}")
            findings.append(
                finding(
                    name,
                    hosts=tuple(names),
                    ends=ends,
                    speed=_speed_text(links[cause.directions[0]]),
                    names=name_several(names),
                    interface=_interface(hosts),
                    evidence=_shortened(lines),
                )
            )
    return findings


def _speed_text(link: Link) -> str:
    speed = link.speed or Speed()
    if speed.wrong_bytes:
        return f"{speed.wrong_bytes:,} bytes were wrong"
    if speed.bytes_per_s is None:
        return f"no data passed in {STALLED_S:g} s"
    return f"{speed.bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
