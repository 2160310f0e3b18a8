"""The network interfaces of this host, and which of its addresses other hosts can use.

A host often has addresses that are of no use here: loopback, Docker bridges (with the same address on every
host), VPNs. This module sorts them, best first; ``reach.py`` decides which one is used by trying
them, never by the order alone.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"

# Bridges and networks of containers and virtual machines; most do not reach other hosts.
_BRIDGES = re.compile(
    r"docker\d|docker_gwbridge|br-|virbr|podman|lxcbr|lxdbr|vboxnet|vmnet|vEthernet \("
    r"|veth|cni|flannel|kube|cali|cilium|lxc|weave|antrea|ovn|vxlan"
)
_VPNS = re.compile(r"tun|tap|wg|tailscale|utun|ppp|zt")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether it is the loopback interface, whatever other addresses it has."""
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)


def read_interfaces() -> tuple[Interface, ...]:
    """Return this host's interfaces; none if the system does not permit it."""
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    interfaces = []
    for name, items in addresses.items():
        own = []
        for item in items:
            if item.family in (socket.AF_INET, socket.AF_INET6):
                own.append(item.address.partition("%")[0])  # the rest repeats the interface
        state = states.get(name)
        interface = Interface(
            name=name,
            up=state is not None and state.isup,
            addresses=tuple(own),
        )
        interfaces.append(interface)
    return tuple(interfaces)


def interface_candidates(interfaces: Sequence[Interface] | None = None) -> list[protocol.Address]:
    """Return the addresses at which other hosts may reach this one, the most likely first.

    Ordinary interfaces come before VPNs, VPNs before container bridges; IPv4 before IPv6, and link-local addresses (169.254) last.
    """
    ordered: list[tuple[tuple[bool, int, int], protocol.Address]] = []
    for interface in _given(interfaces):
        if not interface.up or interface.is_loopback:
            continue
        for text in interface.addresses:
            address = ipaddress.ip_address(text)
            if address.version == 6 and address.is_link_local:
                continue
            distance = _distance(interface.name)
            order = (address.is_link_local, distance, address.version)
            ordered.append((order, protocol.Address(address=text, interface=interface.name)))
    ordered.sort(key=lambda item: item[0])
    return [address for _, address in ordered]


def _distance(name: str) -> int:
    if _BRIDGES.match(name):
        return 2
    return 1 if _VPNS.match(name) else 0


def addresses_for_others() -> list[str]:
    """Return the addresses of this host that other machines can use, best first.

    Raises:
        Impossible: it has none.

    """
    addresses = []
    for candidate in interface_candidates():
        if not ipaddress.ip_address(candidate.address).is_link_local:
            addresses.append(candidate.address)
    if not addresses:
        raise Impossible(
            "this machine has no network address",
            why="other machines cannot join over loopback",
            fix="connect it to a network; ip address  # shows its addresses",
        )
    return addresses


def interface_of(address: str, interfaces: Sequence[Interface] | None = None) -> str | None:
    """Return the name of the interface that has an address."""
    wanted = _parsed(address)
    for interface in _given(interfaces):
        if any(ipaddress.ip_address(own) == wanted for own in interface.addresses):
            return interface.name
    return None


def resolve_host(name: str) -> list[str]:
    """Return the addresses of a name; none if it does not resolve. It may take seconds."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(item[4][0]).partition("%")[0] for item in found))


def is_local(
    word: str,
    interfaces: Sequence[Interface] | None = None,
    *,
    resolve: Callable[[str], Sequence[str]] = resolve_host,
) -> bool:
    """Return whether an address or a name is this host's own.

    Its own name counts even if it does not resolve, as on hosts without a name service. Any other name is
    resolved, which may take seconds.
    """
    bare = word.removeprefix("[").removesuffix("]")
    address = _parsed(bare)
    if address is not None:
        return address.is_loopback or interface_of(bare, interfaces) is not None
    own = socket.gethostname().lower()
    if bare.lower() in {own, own.partition(".")[0], "localhost"}:
        return True
    known = _given(interfaces)
    return any(is_local(found, known) for found in resolve(bare))


def _given(interfaces: Sequence[Interface] | None) -> Sequence[Interface]:
    return read_interfaces() if interfaces is None else interfaces


def _parsed(word: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(word.partition("%")[0])
    except ValueError:
        return None


def socket_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use this interface, each in its own syntax.

    Variables set by the user stay; both libraries treat an empty value as unset.
    """
    wanted = {GLOO_VARIABLE: interface, NCCL_VARIABLE: f"={interface}"}
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def socket_findings(
    environment: Mapping[str, str], interfaces: Sequence[Interface]
) -> list[Finding]:
    """Return a failure if the user's ``GLOO_SOCKET_IFNAME`` cannot work on this host.

    gloo takes names of interfaces only: with NCCL's ``^lo`` it ends with "Unable to find address for: ^lo". NCCL checks its own
    variable, and says what is wrong.
    """
    value = environment.get(GLOO_VARIABLE, "")
    usable = [known.name for known in interfaces if known.up and known.addresses]
    unusable = [name for name in value.split(",") if name and name not in usable]
    if not unusable:
        return []
    return [
        Finding(
            name="socket-interface",
            status=Status.FAILURE,
            what=f"{GLOO_VARIABLE}={value} cannot work on this host",
            why=f"{unusable[0]} is not the name of an interface that is up and has an address; "
            f"gloo would fail with “Unable to find address for: {unusable[0]}”",
            fix=f"unset {GLOO_VARIABLE}  # Muster then uses the interface that reaches the other hosts",
            evidence=f"interfaces here: {', '.join(usable) or 'none with an address'}",
        )
    ]


def check_socket_variables(environment: Mapping[str, str]) -> None:
    """Raise ``Impossible`` if the interface that the user chose for gloo cannot work here."""
    for finding in socket_findings(environment, read_interfaces()):
        raise Impossible(finding.what, why=f"{finding.why}\n{finding.evidence}", fix=finding.fix)
