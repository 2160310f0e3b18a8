"""What is said about links that hurt: for each fault its words, its reason, its fix, its figures."""

from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.diagnose.links.culprits import Group
from torchmuster.diagnose.links.measure import STALLED_S
from torchmuster.diagnose.links.model import End, Link
from torchmuster.finding import Status


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How a fault is told: ``told`` is about one link, the rest about all that have one cause."""

    name: str
    status: Status
    what: Callable[[Group], str]
    why: str
    fix: Callable[[Group], str]
    told: Callable[[Link], str]


def _subject(group: Group, one: str, many: str) -> str:
    return f"{group.words} {one if group.is_one_link else many}"


def _at_each(group: Group, command: Callable[[End], str]) -> str:
    return "\n".join(f"on {end.name}:\n{command(end)}" for end in group.suspects)


def _counters(group: Group) -> str:
    return _at_each(
        group, lambda end: f"sudo ethtool -S {end.interface} | grep -iE 'err|drop|crc|discard'"
    )


def _look_at_the_cable(group: Group) -> str:
    return (
        "change the cable, then the port of the switch; the counters say where it happens\n"
        f"{_counters(group)}"
    )


def _look_for_what_stops_data(group: Group) -> str:
    """Return where to look; where frames are bigger than usual, they may be the reason."""
    lines = [
        "look for a firewall, a VPN or a broken port that stops long transfers; the counters may "
        f"say where it happens\n{_counters(group)}"
    ]
    smaller = _lower_the_mtu(group)
    if smaller:
        lines.append(f"or their frames are too big for something between them; try\n{smaller}")
    return "\n".join(lines)


def _look_at_the_speed(group: Group) -> str:
    lines = _at_each(group, lambda end: f"sudo ethtool {end.interface} | grep -iE 'speed|duplex'")
    return (
        "look for a cable, a port of the switch or a limit (tc, a VPN, Wi-Fi) that is slower than the "
        f"rest\n{lines}"
    )


def _look_at_the_way(group: Group) -> str:
    first = group.links[0]
    return (
        "use machines that are near each other, or an interface that does not lead through a VPN; see "
        f"the way, on {first.source.name}:\nip route get {first.target.address}"
    )


def _lower_the_mtu(group: Group) -> str:
    """Return the commands for those ends that send bigger frames than pass."""
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
    return f"could not be measured in {link.tries} tries: each took too long"


def _told_rate(link: Link) -> str:
    figures = link.figures
    assert figures is not None
    rate = figures.bytes_per_s
    speeds = [
        f"{end.interface} of {end.name} says {end.speed_mbits:,} Mbit/s"
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
    again = f"; TCP sent {figures.retransmits:,} segments again" if figures.retransmits else ""
    return f"{figures.lost:,} of {figures.sent:,} datagrams were lost{again}"


def _told_trip(link: Link) -> str:
    figures = link.figures
    assert figures is not None
    return (
        f"{1000 * (figures.round_trip_s or 0):.1f} ms at best, "
        f"{1000 * (figures.median_round_trip_s or 0):.1f} ms usually"
    )


def _most_loss(group: Group) -> str:
    worst = max((one.figures.loss or 0.0) for one in group.links if one.figures)
    return f"{100 * worst:.0f} %"


def _least_trip(group: Group) -> str:
    trip_s = min((one.figures.round_trip_s or 0.0) for one in group.links if one.figures)
    return f"{1000 * trip_s:.0f} ms" if trip_s >= 0.01 else f"{1000 * trip_s:.1f} ms"


def _best_rate(group: Group) -> str:
    rate = max((one.figures.bytes_per_s or 0.0) for one in group.links if one.figures)
    return f"{rate * 8 / 1e6:,.0f} Mbit/s"


WORDINGS = (
    Wording(
        name="corrupting-link",
        status=Status.FAILURE,
        what=lambda group: _subject(group, "changes data on the way", "change data on the way"),
        why="what arrived is not what was sent, and TCP's checksum did not see it: a broken network "
        "card, memory or switch. Training would go on with wrong numbers",
        fix=_look_at_the_cable,
        told=lambda link: f"{link.figures.wrong_bytes if link.figures else 0:,} bytes were wrong",
    ),
    Wording(
        name="mtu-black-hole",
        status=Status.FAILURE,
        what=lambda group: _subject(
            group,
            "swallows big frames: small messages pass",
            "swallow big frames: small messages pass",
        ),
        why="the machines send bigger frames than something between them carries, and nobody tells "
        "them. Ranks would find each other, and hang with the first big tensor",
        fix=_lower_the_mtu,
        told=_told_frames,
    ),
    Wording(
        name="stalled-link",
        status=Status.WARNING,
        what=lambda group: _subject(
            group, "carries small messages only", "carry small messages only"
        ),
        why="connections are made and small messages answered, but much data does not arrive. "
        "Whether big frames are the reason is not known: no datagram came back that would show it",
        fix=_look_for_what_stops_data,
        told=_told_rate,
    ),
    Wording(
        name="flapping-link",
        status=Status.WARNING,
        what=lambda group: _subject(group, "comes and goes", "come and go"),
        why="connections were made, and were of no use for more than a moment",
        fix=_look_at_the_cable,
        told=_told_tries,
    ),
    Wording(
        name="lossy-link",
        status=Status.WARNING,
        what=lambda group: f"{_subject(group, 'loses', 'lose')} packets: {_most_loss(group)}",
        why="TCP sends again what was lost, after pauses of 200 ms and more, in which all ranks wait",
        fix=_look_at_the_cable,
        told=_told_loss,
    ),
    Wording(
        name="high-latency",
        status=Status.WARNING,
        what=lambda group: (
            f"{_subject(group, 'is', 'are')} a long way: {_least_trip(group)} there and back"
        ),
        why="every collective waits for the longest round trip, many times in each step",
        fix=_look_at_the_way,
        told=_told_trip,
    ),
    Wording(
        name="slow-link",
        status=Status.WARNING,
        what=lambda group: f"{_subject(group, 'is', 'are')} slow: {_best_rate(group)}",
        why="the gradients of each step go over every link, and the slowest one sets the pace",
        fix=_look_at_the_speed,
        told=_told_rate,
    ),
    Wording(
        name="mtu-differs",
        status=Status.NOTE,
        what=lambda group: _subject(
            group,
            "carries smaller frames than the machines send",
            "carry smaller frames than the machines send",
        ),
        why="TCP has found out by itself, so ranks are not harmed; other protocols would be",
        fix=_lower_the_mtu,
        told=_told_frames,
    ),
)
