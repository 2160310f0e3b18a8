"""Network interfaces and routes: which reach other hosts, and which are misconfigured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.devices.readers import sysfs
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.interfaces import Interface

_FOLDER = "/sys/class/net"
_SWITCHED_ON = 0x1  # IFF_UP; with a carrier it is also IFF_RUNNING
_SLOW_MBITS = 100
_MANY_ERRORS = 1000
_ERROR_SHARE = 0.001
_FEW_PORTS = 1000
_VERY_FEW_PORTS = 200


@dataclass(frozen=True, kw_only=True)
class _Card:
    """What the kernel reports of an interface; None if unknown."""

    name: str
    address: str
    speed_mbits: int | None
    duplex: str | None
    packets: int
    errors: int


def interfaces(surroundings: Surroundings) -> Iterator[Finding]:
    """Check each interface that has an address reachable by others."""
    known = network.read_interfaces()
    usable = network.interface_candidates(known)
    # Bridges and tunnels report no physical link state.
    cards = [_card(candidate.interface, candidate.address, surroundings) for candidate in usable]
    wired = list({card.name: card for card in cards if _is_wired(card.name, surroundings)}.values())
    findings = [
        *_none(usable),
        *_unplugged(known, surroundings, others_work=bool(usable)),
        *(found for card in wired for found in _judge(card)),
    ]
    seen = ", ".join(f"{candidate.address} ({candidate.interface})" for candidate in usable)
    yield from findings or [Finding(name="interfaces", status=Status.OK, what=seen)]


def _is_wired(name: str, surroundings: Surroundings) -> bool:
    folder = surroundings.path(f"{_FOLDER}/{name}")
    return not (folder / "bridge").exists() and not (folder / "tun_flags").exists()


def _card(name: str, address: str, surroundings: Surroundings) -> _Card:
    folder = surroundings.path(f"{_FOLDER}/{name}")
    counted = {
        file: sysfs.read_integer(folder / "statistics" / file) or 0
        for file in ("rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_missed_errors")
    }
    speed = sysfs.read_integer(folder / "speed")
    return _Card(
        name=name,
        address=address,
        speed_mbits=speed if speed and speed > 0 else None,
        duplex=sysfs.read_text(folder / "duplex"),
        packets=counted["rx_packets"] + counted["tx_packets"],
        errors=counted["rx_errors"] + counted["tx_errors"] + counted["rx_missed_errors"],
    )


def _none(usable: Sequence[object]) -> Iterator[Finding]:
    if not usable:
        yield Finding(
            name="no-network",
            status=Status.NOTE,
            what="this host has no address that other hosts can reach",
            why="single-host runs work; runs over several hosts do not",
            fix="ip -br address  # lists the interfaces; then bring one up",
        )


def _unplugged(
    known: Sequence[Interface], surroundings: Surroundings, *, others_work: bool
) -> Iterator[Finding]:
    """Yield interfaces that are up and have an address but no carrier."""
    for interface in known:
        folder = surroundings.path(f"{_FOLDER}/{interface.name}")
        switched_on = (sysfs.read_integer(folder / "flags") or 0) & _SWITCHED_ON
        addresses = [word for word in interface.addresses if not word.startswith("fe80")]
        if (
            switched_on
            and addresses
            and sysfs.read_integer(folder / "carrier") == 0
            and _is_wired(interface.name, surroundings)
        ):
            yield Finding(
                name="no-carrier",
                status=Status.NOTE if others_work else Status.WARNING,
                what=f"{interface.name} ({addresses[0]}) is up but has no carrier",
                why="Muster skips it; torchrun may choose it and then time out",
                fix="connect the cable, or disable the interface:\n"
                f"sudo ip link set {interface.name} down",
                evidence=f"{_FOLDER}/{interface.name}/carrier: 0",
            )


def _judge(card: _Card) -> Iterator[Finding]:
    half = card.duplex == "half"
    if half or (card.speed_mbits is not None and card.speed_mbits <= _SLOW_MBITS):
        yield Finding(
            name="link-slow",
            status=Status.WARNING,
            what=f"{card.name} runs at {card.speed_mbits or 'an unknown number of'} Mbit/s"
            + (", half duplex" if half else ""),
            why="a gigabit link falls back to this speed when a cable or port is bad; each step "
            "waits for the gradients to cross it",
            fix=f"sudo ethtool {card.name}  # what both ends offer; then try another cable or port",
            evidence=f"{_FOLDER}/{card.name}: speed {card.speed_mbits}, duplex {card.duplex}",
        )
    if card.errors > _MANY_ERRORS and card.errors > _ERROR_SHARE * card.packets:
        yield Finding(
            name="link-errors",
            status=Status.WARNING,
            what=f"{card.name} reports {card.errors:,} damaged or lost packets out of "
            f"{card.packets:,}",
            why="each lost packet delays a collective by 200 ms or more; a cable, port or "
            "transceiver is bad",
            fix=f"sudo ethtool -S {card.name} | grep -E 'err|drop|crc' | grep -v ': 0$'  # run "
            "twice: if a counter grows, replace the cable",
            evidence=f"{_FOLDER}/{card.name}/statistics",
        )


def routes(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the range of ephemeral ports."""
    table = [line.split() for line in (surroundings.text("/proc/net/route") or "").splitlines()[1:]]
    entries = [fields for fields in table if len(fields) > 7]
    findings = list(_ports(surroundings))
    ways = sorted({fields[0] for fields in entries if fields[1] == "00000000"})
    seen = f"default route through {', '.join(ways)}"
    yield from findings or [Finding(name="routes", status=Status.OK, what=seen)]


def _ports(surroundings: Surroundings) -> Iterator[Finding]:
    file = "/proc/sys/net/ipv4/ip_local_port_range"
    words = (surroundings.text(file) or "").split()
    if len(words) != 2:
        return
    first, last = int(words[0]), int(words[1])
    count = last - first + 1
    if count < _FEW_PORTS:
        yield Finding(
            name="ports-few",
            # A range of 100 is a common firewall setup, and enough for a few ranks.
            status=Status.WARNING if count < _VERY_FEW_PORTS else Status.NOTE,
            what=f"there are only {count} ephemeral ports, {first} to {last}",
            why="each rank listens on one and each connection uses one; when none is left, "
            "connecting fails with “Cannot assign requested address”",
            fix='sudo sysctl net.ipv4.ip_local_port_range="32768 60999"',
            evidence=file,
        )


CHECKS = (
    Check(name="interfaces", asks="Which interfaces reach other hosts?", run=interfaces),
    Check(
        name="routes",
        asks="Are there routes, and enough ephemeral ports?",
        run=routes,
        systems=("linux",),
    ),
)
