"""Network interfaces and routes: which lead to other machines, and which are not as they should be."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.devices.readers import sysfs
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.interfaces import Interface


def port_folders(surroundings: Surroundings) -> dict[str, Path]:
    """Return the folders of all ports of InfiniBand and RoCE cards, by what to call them."""
    folder = surroundings.path("/sys/class/infiniband")
    return {
        f"{card} port {port}": folder / card / "ports" / port
        for card in sysfs.read_names(folder)
        for port in sysfs.read_names(folder / card / "ports")
    }


def is_active(port: Path) -> bool:
    """Say whether a port can be used."""
    return (sysfs.read_text(port / "state") or "").endswith("ACTIVE")


def is_infiniband(port: Path) -> bool:
    """Say whether a port carries InfiniBand itself; of Ethernet it is not known whether RoCE is meant."""
    return sysfs.read_text(port / "link_layer") == "InfiniBand"


def check_infiniband(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the ports of InfiniBand and RoCE cards."""
    ports = port_folders(surroundings)
    down = [name for name, port in ports.items() if not is_active(port)]
    if not down:
        seen = f"{', '.join(ports)} active" if ports else "no InfiniBand here"
        yield Finding(name="infiniband", status=Status.OK, what=seen)
        return
    nothing_left = len(down) == len(ports)
    state = (
        re.sub(r"^\d+: ", "", sysfs.read_text(ports[down[0]] / "state") or "").lower() or "unknown"
    )
    yield Finding(
        name="infiniband-down",
        # Of a card with two ports one is often left free.
        status=Status.WARNING if nothing_left else Status.NOTE,
        what=f"{', '.join(down)} {'is' if len(down) == 1 else 'are'} not active ({state})",
        why="NCCL falls back to sockets, which are many times slower"
        if nothing_left
        else "NCCL uses the other ports; if this one is meant to be used, a cable or the subnet "
        "manager is missing",
        fix="ibstat  # “Physical state: LinkUp” and still not active: the subnet manager is missing\n"
        "sudo systemctl start opensm  # on one machine of the fabric",
    )


_FOLDER = "/sys/class/net"
_SWITCHED_ON = 0x1  # IFF_UP; with a cable it is also running
_SLOW_MBITS = 100
_USUAL_MTU = 1500
_SMALLEST_MTU = 1280  # what IPv6 asks of every link
_MANY_ERRORS = 1000
_ERROR_SHARE = 0.001
_FEW_PORTS = 1000
_VERY_FEW_PORTS = 200


@dataclass(frozen=True, kw_only=True)
class _Card:
    """What the kernel tells of an interface; None where it does not."""

    name: str
    address: str
    speed_mbits: int | None
    duplex: str | None
    mtu: int | None
    packets: int
    errors: int


def interfaces(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at each interface that has an address for others."""
    known = network.read_interfaces()
    usable = network.interface_candidates(known)
    # One of a bridge or a tunnel says nothing of a cable.
    cards = [_card(one.interface, one.address, surroundings) for one in usable]
    wired = list({one.name: one for one in cards if _is_wired(one.name, surroundings)}.values())
    findings = [
        *_none(usable),
        *_unplugged(known, surroundings, others_work=bool(usable)),
        *_twice(known),
        *(found for card in wired for found in _judge(card)),
        *_several([one.name for one in wired]),
    ]
    seen = ", ".join(f"{one.address} ({one.interface})" for one in usable)
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
        mtu=sysfs.read_integer(folder / "mtu"),
        packets=counted["rx_packets"] + counted["tx_packets"],
        errors=counted["rx_errors"] + counted["tx_errors"] + counted["rx_missed_errors"],
    )


def _none(usable: Sequence[object]) -> Iterator[Finding]:
    if not usable:
        yield Finding(
            name="no-network",
            status=Status.NOTE,
            what="this machine has no address at which others could reach it",
            why="ranks on this machine alone can work together; a run over several machines cannot",
            fix="ip -br address  # which interfaces there are; then bring one up",
        )


def _twice(known: Sequence[Interface]) -> Iterator[Finding]:
    holders: dict[str, list[str]] = {}
    for one in known:
        for address in one.addresses:
            # An address with fe80 is meant for its own link, so that two may be alike.
            if one.up and not one.is_loopback and not address.startswith("fe80"):
                holders.setdefault(address, []).append(one.name)
    for address, names in holders.items():
        if len(names) > 1:
            yield Finding(
                name="address-twice",
                status=Status.WARNING,
                what=f"{' and '.join(names)} have the same address, {address}",
                why="answers leave by one of them only, whichever the question came by",
                fix="ip -br address  # then take it from the one that should not have it, where its "
                "settings are kept",
            )


def _unplugged(
    known: Sequence[Interface], surroundings: Surroundings, *, others_work: bool
) -> Iterator[Finding]:
    """Find interfaces that were switched on and given an address, and have no cable."""
    for one in known:
        folder = surroundings.path(f"{_FOLDER}/{one.name}")
        switched_on = (sysfs.read_integer(folder / "flags") or 0) & _SWITCHED_ON
        addresses = [word for word in one.addresses if not word.startswith("fe80")]
        if (
            switched_on
            and addresses
            and sysfs.read_integer(folder / "carrier") == 0
            and _is_wired(one.name, surroundings)
        ):
            yield Finding(
                name="no-carrier",
                status=Status.NOTE if others_work else Status.WARNING,
                what=f"{one.name} ({addresses[0]}) is on, but nothing is connected to it",
                why="muster leaves it out; torchrun may choose it and then wait for others in vain",
                fix="plug the cable in, or switch the interface off:\n"
                f"sudo ip link set {one.name} down",
                evidence=f"{_FOLDER}/{one.name}/carrier: 0",
            )


def _judge(card: _Card) -> Iterator[Finding]:
    half = card.duplex == "half"
    if half or (card.speed_mbits is not None and card.speed_mbits <= _SLOW_MBITS):
        yield Finding(
            name="link-slow",
            status=Status.WARNING,
            what=f"{card.name} runs at {card.speed_mbits or 'an unknown number of'} Mbit/s"
            + (", half duplex" if half else ""),
            why="a gigabit link falls back to this when a cable or a port is bad; each step would wait "
            "for the gradients to cross it",
            fix=f"sudo ethtool {card.name}  # what both ends offer; then try another cable or port",
            evidence=f"{_FOLDER}/{card.name}: speed {card.speed_mbits}, duplex {card.duplex}",
        )
    if card.errors > _MANY_ERRORS and card.errors > _ERROR_SHARE * card.packets:
        yield Finding(
            name="link-errors",
            status=Status.WARNING,
            what=f"{card.name} counted {card.errors:,} damaged or lost packets among {card.packets:,}",
            why="each lost packet holds a collective up by 200 ms or more; a cable, a port or a "
            "transceiver is bad",
            fix=f"sudo ethtool -S {card.name} | grep -E 'err|drop|crc' | grep -v ': 0$'  # which, and "
            "whether they grow; then try another cable",
            evidence=f"{_FOLDER}/{card.name}/statistics",
        )
    if card.mtu is not None and card.mtu < _SMALLEST_MTU:
        yield Finding(
            name="mtu-small",
            status=Status.WARNING,
            what=f"{card.name} sends packets of at most {card.mtu} bytes",
            why="it takes several times as many packets, and IPv6 does not work at all",
            fix=f"sudo ip link set {card.name} mtu {_USUAL_MTU}",
        )
    elif card.mtu is not None and card.mtu > _USUAL_MTU:
        yield Finding(
            name="mtu-large",
            status=Status.NOTE,
            what=f"{card.name} sends packets of up to {card.mtu} bytes",
            why="every switch on the way must carry them, or large messages vanish while small ones "
            "arrive; muster check tries it",
            fix="muster check --hosts A,B  # whether they arrive",
        )


def _several(names: Sequence[str]) -> Iterator[Finding]:
    if len(names) > 1:
        yield Finding(
            name="several-interfaces",
            status=Status.NOTE,
            what=f"several interfaces may lead to other machines: {', '.join(names)}",
            why=f"muster tries {names[0]} first and takes the one that all machines reach; a bare "
            "torchrun takes the one that the own name stands for",
            fix=f"export GLOO_SOCKET_IFNAME={names[0]} NCCL_SOCKET_IFNAME=={names[0]}  # for torchrun",
        )


def routes(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the routes, and at the ports that connections are given."""
    table = [line.split() for line in (surroundings.text("/proc/net/route") or "").splitlines()[1:]]
    entries = [fields for fields in table if len(fields) > 7]
    findings = [*_default(entries), *_same_network(entries), *_ports(surroundings)]
    ways = sorted({fields[0] for fields in entries if fields[1] == "00000000"})
    seen = f"the default route is by {', '.join(ways)}"
    yield from findings or [Finding(name="routes", status=Status.OK, what=seen)]


def _default(entries: Sequence[Sequence[str]]) -> Iterator[Finding]:
    if not any(fields[1] == "00000000" for fields in entries):
        yield Finding(
            name="no-default-route",
            status=Status.NOTE,
            what="there is no route to other networks",
            why="machines on the same network are reached; others, and the internet, are not",
            fix="sudo ip route add default via ROUTER",
        )


def _same_network(entries: Sequence[Sequence[str]]) -> Iterator[Finding]:
    ways: dict[tuple[str, str], list[str]] = {}
    for fields in entries:
        if fields[1] != "00000000" and fields[0] not in ways.setdefault((fields[1], fields[7]), []):
            ways[fields[1], fields[7]].append(fields[0])
    for names in ways.values():
        if len(names) > 1:
            yield Finding(
                name="same-network-twice",
                status=Status.NOTE,
                what=f"{' and '.join(names)} are on the same network",
                why="what is sent leaves by the first, whichever the others know this machine by; a "
                "strict rp_filter then drops what comes by the other",
                fix="ip route  # by which it leaves; then give each a network of its own, or do without "
                "one by which nobody is connected",
                evidence="/proc/net/route",
            )


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
            # A hundred is a known way through a firewall, and enough for a few ranks.
            status=Status.WARNING if count < _VERY_FEW_PORTS else Status.NOTE,
            what=f"connections have only {count} ports to choose from, {first} to {last}",
            why="each rank listens at one and each connection takes one; when they are used up, "
            "connecting ends with “Cannot assign requested address”",
            fix='sudo sysctl net.ipv4.ip_local_port_range="32768 60999"',
            evidence=file,
        )
    elif first <= USUAL_PORT <= last and not _is_reserved(surroundings):
        yield Finding(
            name="ports-overlap",
            status=Status.NOTE,
            what=f"port {USUAL_PORT}, at which machines meet, may be given to any connection",
            why=f"ports from {first} to {last} are handed out; muster takes the next one, torchrun ends",
            fix=f"sudo sysctl net.ipv4.ip_local_reserved_ports={USUAL_PORT},29500",
            evidence=file,
        )


def _is_reserved(surroundings: Surroundings) -> bool:
    listed = surroundings.text("/proc/sys/net/ipv4/ip_local_reserved_ports") or ""
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and int(first) <= USUAL_PORT <= int(last or first):
            return True
    return False


CHECKS = (
    Check(name="interfaces", asks="Which interfaces lead to other machines?", run=interfaces),
    Check(
        name="routes",
        asks="Are there routes, and ports for connections?",
        run=routes,
        systems=("linux",),
    ),
    Check(
        name="infiniband",
        asks="Are the InfiniBand ports active?",
        run=check_infiniband,
        systems=("linux",),
    ),
)
