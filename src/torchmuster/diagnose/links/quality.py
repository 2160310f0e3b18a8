"""Links that work but are bad: wrong data, stalls, lost connections, high latency, low speed."""

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.links.call import STALLED_S
from torchmuster.diagnose.links.groups import LinkGroup, grouped
from torchmuster.diagnose.links.model import Link
from torchmuster.finding import Finding, Status

# Round trips longer than the second limit are high however busy the hosts are.
FAR_S, _VERY_FAR_S = 0.010, 0.050
# Shorter round trips are never reported, however they compare with the others.
_NEAR_S, _TIMES_FARTHER = 0.001, 5
# Slower than the first slows any training; faster than the second cannot be measured reliably.
SLOW_BYTES_PER_S, _FAST_BYTES_PER_S = 250e6 / 8, 1e9
_TIMES_SLOWER = 4
# Upper bound for the correction by the time that a busy host spent waiting.
_MOST_WAITING = 0.95
_USUAL_MTU, _TUNNEL_MTU = 1500, 1400
_LINES_SHOWN = 6


class LinkFault(enum.Enum):
    """What is wrong with a link that connects, worst first; of several, the first is reported."""

    CORRUPTS = "corrupting-link"
    STALLS = "stalled-link"
    DROPS = "flapping-link"
    FAR = "high-latency"
    SLOW = "slow-link"


_STATUS = {LinkFault.CORRUPTS: Status.FAILURE, LinkFault.STALLS: Status.FAILURE}
_WHY = {
    LinkFault.CORRUPTS: "the data that arrived differs from the data sent, and TCP's checksum did "
    "not detect it: a broken network adapter, memory or switch. Training would continue with wrong "
    "numbers",
    LinkFault.STALLS: "connections open and small messages pass, but large transfers stall: a device "
    "on the path drops large frames (MTU), or a firewall or a VPN stops long transfers. Ranks would "
    "connect, and hang at the first large tensor",
    LinkFault.DROPS: "connections opened, but were lost again or timed out",
    LinkFault.FAR: "every collective waits for the longest round trip, many times per step",
    LinkFault.SLOW: "the gradients of each step cross every link, so the slowest link limits the "
    "speed",
}


def fault_of(link: Link, usual: "Usual") -> LinkFault | None:
    """Return the worst fault of a measured link; None if it has none."""
    figures = link.figures
    if figures is not None and figures.wrong_bytes > 0:
        return LinkFault.CORRUPTS
    if figures is not None and figures.stalled:
        return LinkFault.STALLS
    if figures is None or link.dropped > 0:
        return LinkFault.DROPS
    trip_s = figures.round_trip_s or 0.0
    if trip_s > FAR_S or trip_s > max(_NEAR_S, _TIMES_FARTHER * usual.round_trip_s):
        return LinkFault.FAR
    back = usual.rates.get((link.target.place, link.source.place), 0.0)
    compared = max(usual.bytes_per_s, back) / _TIMES_SLOWER
    rate = figures.bytes_per_s or 0.0
    # The speed that the link could have had on idle hosts, at most.
    possible = rate / (1 - min(figures.waited_share, _MOST_WAITING))
    is_slow_anywhere = rate < SLOW_BYTES_PER_S and possible < _TIMES_SLOWER * SLOW_BYTES_PER_S
    if possible < compared or is_slow_anywhere:
        return LinkFault.SLOW
    return None


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The typical figures of the links of this group, and the speed of each direction."""

    bytes_per_s: float
    round_trip_s: float
    rates: Mapping[tuple[int, int], float]


def _usual(links: Sequence[Link]) -> Usual:
    rates: dict[tuple[int, int], float] = {}
    trips = []
    for link in links:
        if link.figures is not None and link.figures.bytes_per_s:
            rates[link.places] = min(link.figures.bytes_per_s, _FAST_BYTES_PER_S)
        if link.figures is not None and link.figures.round_trip_s:
            trips.append(link.figures.round_trip_s)
    return Usual(
        bytes_per_s=statistics.median(rates.values()) if rates else 0.0,
        round_trip_s=statistics.median(trips) if trips else 0.0,
        rates=rates,
    )


def _faulty(links: Sequence[Link]) -> dict[LinkFault, list[Link]]:
    """Return the measured links by their fault; a pair is reported once, with its worst fault."""
    measured = [link for link in links if link.tries]
    usual = _usual(measured)
    faults = {link.places: fault_of(link, usual) for link in measured}
    faulty: dict[LinkFault, list[Link]] = {}
    reported: set[frozenset[int]] = set()
    for fault in LinkFault:
        bad = []
        for link in measured:
            if faults[link.places] is fault and frozenset(link.places) not in reported:
                bad.append(link)
        reported |= {frozenset(link.places) for link in bad}
        if bad:
            faulty[fault] = bad
    return faulty


def suspects(links: Sequence[Link]) -> list[tuple[int, int]]:
    """Return the pairs to measure again: a busy host may be the only cause."""
    pairs = set()
    for fault, bad in _faulty(links).items():
        for link in bad:
            trip_s = link.figures.round_trip_s if link.figures else None
            if fault is LinkFault.FAR and (trip_s or 0.0) > _VERY_FAR_S:
                continue  # no second try can change it
            pairs.add((min(link.places), max(link.places)))
    return sorted(pairs)


def quality_findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for each fault of measured links and each host that causes it."""
    findings = []
    measured = [link for link in links if link.tries]
    for fault, bad in _faulty(links).items():
        for group in grouped(bad, measured):
            lines = [f"{link.name}: {_figures(link, fault)}" for link in group.links[:_LINES_SHOWN]]
            if len(group.links) > _LINES_SHOWN:
                lines.append(f"and {len(group.links) - _LINES_SHOWN:,} more")
            findings.append(
                Finding(
                    name=fault.value,
                    status=_STATUS.get(fault, Status.WARNING),
                    what=_what(fault, group),
                    why=_WHY[fault],
                    fix=_fix(fault, group),
                    evidence="\n".join(lines),
                    hosts=group.hosts,
                )
            )
    return findings


def _what(fault: LinkFault, group: LinkGroup) -> str:
    figures = [link.figures for link in group.links if link.figures is not None]
    match fault:
        case LinkFault.CORRUPTS:
            return f"corrupted data: {group.words}"
        case LinkFault.STALLS:
            return f"large transfers stall, small messages pass: {group.words}"
        case LinkFault.DROPS:
            return f"connections are lost: {group.words}"
        case LinkFault.FAR:
            trip_ms = 1000 * min(figure.round_trip_s or 0.0 for figure in figures)
            digits = 0 if trip_ms >= 10 else 1
            return f"high latency: {group.words}: {trip_ms:.{digits}f} ms round trip"
        case LinkFault.SLOW:
            rate = max(figure.bytes_per_s or 0.0 for figure in figures)
            return f"slow: {group.words}: {rate * 8 / 1e6:,.0f} Mbit/s"


def _figures(link: Link, fault: LinkFault) -> str:
    figures = link.figures
    if figures is None or fault is LinkFault.DROPS:
        if link.dropped:
            return f"connections were lost in {link.dropped} of {link.tries} tries"
        return f"could not be measured in {link.tries} tries: each timed out"
    if fault is LinkFault.CORRUPTS:
        return f"{figures.wrong_bytes:,} bytes were wrong"
    if fault is LinkFault.FAR:
        best_ms = 1000 * (figures.round_trip_s or 0)
        return (
            f"{best_ms:.1f} ms at best, {1000 * (figures.median_round_trip_s or 0):.1f} ms median"
        )
    parts = [f"no data passed in {STALLED_S:g} s"]
    if figures.bytes_per_s:
        parts = [f"{figures.bytes_per_s * 8 / 1e6:,.0f} Mbit/s"]
    for end in (link.source, link.target):
        if end.speed_mbits:
            parts.append(f"{end.interface} of {end.name} reports {end.speed_mbits:,} Mbit/s")
    return "; ".join(parts)


def _fix(fault: LinkFault, group: LinkGroup) -> str:
    counters = "sudo ethtool -S {interface} | grep -iE 'err|drop|crc|discard'"
    match fault:
        case LinkFault.STALLS:
            return (
                "lower the MTU of the hosts to what the path carries, or check for a firewall or a "
                f"VPN that stops long transfers\n{_lower_the_mtu(group)}"
            )
        case LinkFault.CORRUPTS | LinkFault.DROPS:
            return (
                "replace the cable, then try another switch port; the counters show which end has "
                f"errors\n{_at_each(group, counters)}"
            )
        case LinkFault.FAR:
            first = group.links[0]
            return (
                "use hosts that are close to each other, or an interface without a VPN; check the "
                f"route, on {first.source.name}:\nip route get {first.target.address}"
            )
        case LinkFault.SLOW:
            speed = "sudo ethtool {interface} | grep -iE 'speed|duplex'"
            return (
                "check for a cable, a switch port or a limit (tc, a VPN, Wi-Fi) that is slower than "
                f"the rest\n{_at_each(group, speed)}"
            )


def _at_each(group: LinkGroup, command: str) -> str:
    lines = []
    for end in group.suspects:
        lines.append(f"on {end.name}:\n{command.format(interface=end.interface)}")
    return "\n".join(lines)


def _lower_the_mtu(group: LinkGroup) -> str:
    """Return the commands for the ends with large frames; for all ends, if none has."""
    ends = {}
    for link in group.links:
        ends[link.source.place], ends[link.target.place] = link.source, link.target
    size = _USUAL_MTU
    large = [end for end in ends.values() if (end.mtu_bytes or 0) > _USUAL_MTU]
    if not large:
        large, size = list(ends.values()), _TUNNEL_MTU
    lines = []
    for end in large:
        lines.append(f"on {end.name}:\nsudo ip link set dev {end.interface} mtu {size}")
    return "\n".join(lines)
