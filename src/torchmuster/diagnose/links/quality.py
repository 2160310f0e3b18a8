"""Links that work but are bad: stalls, corrupted data, packet loss, high latency, low bandwidth.

Of the faults of a link, only the first in the order of ``_FAULTS`` is reported; the rest follow
from it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.links.culprits import LinkGroup, grouped
from torchmuster.diagnose.links.measure import STALLED_S
from torchmuster.diagnose.links.model import End, Figures, Link
from torchmuster.finding import Finding, Status


@dataclass(frozen=True, kw_only=True)
class LinkMessages:
    """The texts of a fault: ``told`` describes one link, the rest all links with the same cause."""

    name: str
    status: Status
    what: Callable[[LinkGroup], str]
    why: str
    fix: Callable[[LinkGroup], str]
    told: Callable[[Link], str]


def _subject(group: LinkGroup, one: str, many: str) -> str:
    return f"{group.words} {one if group.is_one_link else many}"


def _at_each(group: LinkGroup, command: Callable[[End], str]) -> str:
    return "\n".join(f"on {end.name}:\n{command(end)}" for end in group.suspects)


def _counters(group: LinkGroup) -> str:
    return _at_each(
        group, lambda end: f"sudo ethtool -S {end.interface} | grep -iE 'err|drop|crc|discard'"
    )


def _look_at_the_cable(group: LinkGroup) -> str:
    return (
        "replace the cable, then try another switch port; the counters show which end has errors\n"
        f"{_counters(group)}"
    )


def _look_for_what_stops_data(group: LinkGroup) -> str:
    """Return what to check; frames larger than usual may be the cause."""
    lines = [
        "check for a firewall, a VPN or a broken port that blocks long transfers; the counters may "
        f"show which end has errors\n{_counters(group)}"
    ]
    smaller = _lower_the_mtu(group)
    if smaller:
        lines.append(f"or a device on the path does not support their frame size; try\n{smaller}")
    return "\n".join(lines)


def _look_at_the_speed(group: LinkGroup) -> str:
    lines = _at_each(group, lambda end: f"sudo ethtool {end.interface} | grep -iE 'speed|duplex'")
    return (
        "check for a cable, a switch port or a limit (tc, a VPN, Wi-Fi) that is slower than the "
        f"rest\n{lines}"
    )


def _look_at_the_way(group: LinkGroup) -> str:
    first = group.links[0]
    return (
        "use hosts that are close to each other, or an interface without a VPN; check the route, "
        f"on {first.source.name}:\nip route get {first.target.address}"
    )


def _lower_the_mtu(group: LinkGroup) -> str:
    """Return the commands for the ends that send larger frames than pass."""
    sizes: dict[int, tuple[End, int]] = {}
    for link in group.links:
        passes = link.figures.frame_bytes if link.figures else None
        size = passes or 1500
        for end in (link.source, link.target):
            if end.mtu_bytes is None or end.mtu_bytes > size:
                least = min(size, sizes[end.place][1] if end.place in sizes else size)
                sizes[end.place] = end, least
    return "\n".join(
        f"on {end.name}:\nsudo ip link set dev {end.interface} mtu {size}"
        for end, size in sizes.values()
    )


def _told_tries(link: Link) -> str:
    if link.dropped:
        return f"connections were lost in {link.dropped} of {link.tries} tries"
    return f"could not be measured in {link.tries} tries: each timed out"


def _told_rate(link: Link) -> str:
    figures = link.figures
    assert figures is not None
    rate = figures.bytes_per_s
    speeds = [
        f"{end.interface} of {end.name} reports {end.speed_mbits:,} Mbit/s"
        for end in (link.source, link.target)
        if end.speed_mbits
    ]
    told = f"{rate * 8 / 1e6:,.0f} Mbit/s" if rate else f"no data passed in {STALLED_S:g} s"
    return "; ".join([told, *speeds])


def _told_frames(link: Link) -> str:
    figures = link.figures
    assert figures is not None
    return f"frames of {figures.frame_bytes:,} bytes pass, {figures.frame_tried_bytes:,} do not"


def _told_loss(link: Link) -> str:
    figures = link.figures
    assert figures is not None
    again = f"; TCP retransmitted {figures.retransmits:,} segments" if figures.retransmits else ""
    return f"{figures.lost:,} of {figures.sent:,} datagrams were lost{again}"


def _told_trip(link: Link) -> str:
    figures = link.figures
    assert figures is not None
    return (
        f"{1000 * (figures.round_trip_s or 0):.1f} ms at best, "
        f"{1000 * (figures.median_round_trip_s or 0):.1f} ms median"
    )


def _most_loss(group: LinkGroup) -> str:
    worst = max((one.figures.loss or 0.0) for one in group.links if one.figures)
    return f"{100 * worst:.0f} %"


def _least_trip(group: LinkGroup) -> str:
    trip_s = min((one.figures.round_trip_s or 0.0) for one in group.links if one.figures)
    return f"{1000 * trip_s:.0f} ms" if trip_s >= 0.01 else f"{1000 * trip_s:.1f} ms"


def _best_rate(group: LinkGroup) -> str:
    rate = max((one.figures.bytes_per_s or 0.0) for one in group.links if one.figures)
    return f"{rate * 8 / 1e6:,.0f} Mbit/s"


WORDINGS = (
    LinkMessages(
        name="corrupting-link",
        status=Status.FAILURE,
        what=lambda group: _subject(group, "corrupts data", "corrupt data"),
        why="the data that arrived differs from the data sent, and TCP's checksum did not detect "
        "it: a broken network adapter, memory or switch. Training would continue with wrong "
        "numbers",
        fix=_look_at_the_cable,
        told=lambda link: f"{link.figures.wrong_bytes if link.figures else 0:,} bytes were wrong",
    ),
    LinkMessages(
        name="mtu-black-hole",
        status=Status.FAILURE,
        what=lambda group: _subject(
            group,
            "drops large frames, but small messages pass",
            "drop large frames, but small messages pass",
        ),
        why="the hosts send larger frames than a device on the path supports, and get no error. "
        "Ranks would connect, and hang at the first large tensor",
        fix=_lower_the_mtu,
        told=_told_frames,
    ),
    LinkMessages(
        name="stalled-link",
        status=Status.WARNING,
        what=lambda group: _subject(
            group, "carries small messages only", "carry small messages only"
        ),
        why="connections open and small messages pass, but large transfers stall. Whether large "
        "frames are the cause is unknown, because no test datagram was answered",
        fix=_look_for_what_stops_data,
        told=_told_rate,
    ),
    LinkMessages(
        name="flapping-link",
        status=Status.WARNING,
        what=lambda group: _subject(group, "is unstable", "are unstable"),
        why="connections opened, but were lost again or timed out",
        fix=_look_at_the_cable,
        told=_told_tries,
    ),
    LinkMessages(
        name="lossy-link",
        status=Status.WARNING,
        what=lambda group: f"{_subject(group, 'loses', 'lose')} packets: {_most_loss(group)}",
        why="TCP retransmits lost packets after pauses of 200 ms or more, during which all ranks "
        "wait",
        fix=_look_at_the_cable,
        told=_told_loss,
    ),
    LinkMessages(
        name="high-latency",
        status=Status.WARNING,
        what=lambda group: (
            f"{_subject(group, 'has', 'have')} high latency: {_least_trip(group)} round trip"
        ),
        why="every collective waits for the longest round trip, many times per step",
        fix=_look_at_the_way,
        told=_told_trip,
    ),
    LinkMessages(
        name="slow-link",
        status=Status.WARNING,
        what=lambda group: f"{_subject(group, 'is', 'are')} slow: {_best_rate(group)}",
        why="the gradients of each step cross every link, so the slowest link limits the speed",
        fix=_look_at_the_speed,
        told=_told_rate,
    ),
    LinkMessages(
        name="mtu-differs",
        status=Status.NOTE,
        what=lambda group: _subject(
            group,
            "carries smaller frames than the hosts send",
            "carry smaller frames than the hosts send",
        ),
        why="TCP has adapted to the smaller size, so ranks are not affected; other protocols may be",
        fix=_lower_the_mtu,
        told=_told_frames,
    ),
)


LOSSY = 0.01
FAR_S = 0.010
# Shorter round trips are never reported, however they compare with the others.
_NEAR_S, _TIMES_FARTHER = 0.001, 5
# Slower than the first slows any training; faster than the second cannot be measured reliably.
SLOW_BYTES_PER_S, _FAST_BYTES_PER_S = 250e6 / 8, 1e9
_TIMES_SLOWER = 4
# Upper bound for the correction by the time that a busy host spent waiting.
_MOST_WAITING = 0.95
_LINES_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A fault of a link; its texts are in ``WORDINGS``."""

    name: str
    is_bad: Callable[[Link, "_Usual"], bool]
    is_sure: Callable[[Link], bool] = lambda link: False  # no second try can change it

    @property
    def wording(self) -> LinkMessages:
        return next(one for one in WORDINGS if one.name == self.name)


@dataclass(frozen=True, kw_only=True)
class _Usual:
    """The typical figures of the links of this group."""

    bytes_per_s: float
    round_trip_s: float
    back: dict[tuple[int, int], Figures]


def quality_findings(links: Sequence[Link]) -> list[Finding]:
    """Return a finding for each fault of measured links and each host that causes it."""
    found = []
    for fault, bad in _faulty(links):
        words = fault.wording
        for group in grouped(bad, _measured(links)):
            lines = [f"{one.name}: {words.told(one)}" for one in group.links[:_LINES_SHOWN]]
            if len(group.links) > _LINES_SHOWN:
                lines.append(f"and {len(group.links) - _LINES_SHOWN:,} more")
            found.append(
                Finding(
                    name=words.name,
                    status=words.status,
                    what=words.what(group),
                    why=words.why,
                    fix=words.fix(group),
                    evidence="\n".join(lines),
                )
            )
    return found


def suspects(links: Sequence[Link]) -> list[tuple[int, int]]:
    """Return the pairs to measure again: a busy host may be the only cause."""
    pairs = {
        (min(one.places), max(one.places))
        for fault, bad in _faulty(links)
        if fault.wording.status is not Status.NOTE
        for one in bad
        if not fault.is_sure(one)
    }
    return sorted(pairs)


def _faulty(links: Sequence[Link]) -> list[tuple[_Fault, list[Link]]]:
    measured = _measured(links)
    usual = _usual(measured)
    found: list[tuple[_Fault, list[Link]]] = []
    said: set[frozenset[int]] = set()
    for fault in _FAULTS:
        bad = [
            one
            for one in measured
            if frozenset(one.places) not in said and fault.is_bad(one, usual)
        ]
        said |= {frozenset(one.places) for one in bad}
        if bad:
            found.append((fault, bad))
    return found


def _measured(links: Sequence[Link]) -> list[Link]:
    return [one for one in links if one.tries]


def _usual(links: Sequence[Link]) -> _Usual:
    rates = [_capped(one.figures) for one in links if one.figures and one.figures.bytes_per_s]
    trips = [one.figures.round_trip_s for one in links if one.figures and one.figures.round_trip_s]
    return _Usual(
        bytes_per_s=statistics.median(rates) if rates else 0.0,
        round_trip_s=statistics.median(trips) if trips else 0.0,
        back={
            (one.target.place, one.source.place): one.figures
            for one in links
            if one.figures is not None
        },
    )


def _capped(figures: Figures) -> float:
    return min(figures.bytes_per_s or 0.0, _FAST_BYTES_PER_S)


# ---- what is bad


def _corrupts(link: Link, usual: _Usual) -> bool:
    return link.figures is not None and link.figures.wrong_bytes > 0


def _swallows_big_frames(link: Link, usual: _Usual) -> bool:
    figures = link.figures
    return figures is not None and figures.stalled and _sends_bigger_than_passes(link, usual)


def _stalls_without_a_reason(link: Link, usual: _Usual) -> bool:
    # Where datagrams are blocked, only the stall itself is known.
    figures = link.figures
    return figures is not None and figures.stalled and figures.frame_bytes is None


def _drops(link: Link, usual: _Usual) -> bool:
    return link.dropped > 0 or link.figures is None


def _loses(link: Link, usual: _Usual) -> bool:
    return link.figures is not None and (link.figures.loss or 0.0) >= LOSSY


def _is_far(link: Link, usual: _Usual) -> bool:
    trip_s = link.figures.round_trip_s if link.figures is not None else None
    if trip_s is None:
        return False
    return trip_s > FAR_S or trip_s > max(_NEAR_S, _TIMES_FARTHER * usual.round_trip_s)


def _is_slow(link: Link, usual: _Usual) -> bool:
    figures = link.figures
    if figures is None:
        return False
    if figures.stalled:  # and large frames do arrive
        return True
    freed, back = _freed(figures), usual.back.get(link.places)
    compared = max(usual.bytes_per_s, _capped(back) if back else 0.0) / _TIMES_SLOWER
    if _sends_bigger_than_passes(link, usual):  # which alone makes it slower than the others
        compared = 0.0
    slow_anywhere = (figures.bytes_per_s or 0.0) < SLOW_BYTES_PER_S
    return freed < compared or (slow_anywhere and freed < _TIMES_SLOWER * SLOW_BYTES_PER_S)


def _freed(figures: Figures) -> float:
    """Return the speed that the link could have had on idle hosts, at most."""
    return (figures.bytes_per_s or 0.0) / (1 - min(figures.waited_share, _MOST_WAITING))


def _sends_bigger_than_passes(link: Link, usual: _Usual) -> bool:
    figures = link.figures
    if figures is None or figures.frame_bytes is None or figures.frame_tried_bytes is None:
        return False
    return figures.frame_bytes < figures.frame_tried_bytes


# ---- what needs no second try


def _is_very_far(link: Link) -> bool:
    return link.figures is not None and (link.figures.round_trip_s or 0.0) > _TIMES_FARTHER * FAR_S


_FAULTS = (
    _Fault(name="corrupting-link", is_bad=_corrupts),
    _Fault(name="mtu-black-hole", is_bad=_swallows_big_frames, is_sure=lambda link: True),
    _Fault(name="stalled-link", is_bad=_stalls_without_a_reason),
    _Fault(name="flapping-link", is_bad=_drops),
    _Fault(name="lossy-link", is_bad=_loses),
    _Fault(name="high-latency", is_bad=_is_far, is_sure=_is_very_far),
    _Fault(name="slow-link", is_bad=_is_slow),
    _Fault(name="mtu-differs", is_bad=_sends_bigger_than_passes),
)
