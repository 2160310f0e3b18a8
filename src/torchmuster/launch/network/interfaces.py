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

# Bridges between a host and its containers or virtual machines: they do not reach other hosts.
_BRIDGES_WITHIN = re.compile(
    r"docker\d|docker_gwbridge|br-|virbr|podman|lxcbr|lxdbr|vboxnet|vmnet|vEthernet \("
)
# Container networks that may span hosts.
_CONTAINERS = re.compile(r"veth|cni|flannel|kube|cali|cilium|lxc|weave|antrea|ovn|vxlan")
_VPNS = re.compile(r"tun|tap|wg|tailscale|utun|ppp|zt")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface; ``speed_mbits`` is 0 if the system does not report it."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    speed_mbits: int = 0

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
            speed_mbits=state.speed if state is not None else 0,
        )
        interfaces.append(interface)
    return tuple(interfaces)


def interface_candidates(interfaces: Sequence[Interface] | None = None) -> list[protocol.Address]:
    """Return the addresses at which other hosts may reach this one, the most likely first.

    Ordinary interfaces come before VPNs, VPNs before container bridges; fast before slow, IPv4 before
    IPv6, and link-local addresses (169.254) last.
    """
    ordered: list[tuple[tuple[bool, int, int, int], protocol.Address]] = []
    for interface in _given(interfaces):
        if not interface.up or interface.is_loopback:
            continue
        for text in interface.addresses:
            address = ipaddress.ip_address(text)
            if address.version == 6 and address.is_link_local:
                continue
            distance = _distance(interface.name)
            order = (address.is_link_local, distance, -interface.speed_mbits, address.version)
            ordered.append((order, protocol.Address(address=text, interface=interface.name)))
    ordered.sort(key=lambda item: item[0])
    return [address for _, address in ordered]


def _distance(name: str) -> int:
    if _BRIDGES_WITHIN.match(name) or _CONTAINERS.match(name):
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
    look_up: Callable[[str], Sequence[str]] = resolve_host,
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
    return any(is_local(found, known) for found in look_up(bare))


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
    environment: Mapping[str, str], interfaces: Sequence[Interface], *, alone: bool, gpus: bool
) -> list[Finding]:
    """Return a failure for each interface variable set by the user that cannot work here.

    ``alone`` means that the run has no other hosts; without ``gpus`` NCCL is not used.
    """
    findings = []
    for variable, equals in ((GLOO_VARIABLE, ""), (NCCL_VARIABLE, "=")):
        value = environment.get(variable, "")
        if not value or (variable == NCCL_VARIABLE and not gpus):
            continue
        why = _trouble(variable, value, interfaces, alone=alone)
        if not why:
            continue
        listed = []
        for known in interfaces:
            if known.addresses:
                state = "" if known.up else "; down"
                listed.append(f"{known.name} ({', '.join(known.addresses)}{state})")
        fix = f"unset {variable}  # Muster then uses the interface that reaches the other hosts"
        for best in interface_candidates(interfaces)[:1]:
            fix += f"\nexport {variable}={equals}{best.interface}  # or choose one"
        findings.append(
            Finding(
                name="socket-interface",
                status=Status.FAILURE,
                what=f"{variable}={value} cannot work on this host",
                why=why,
                fix=fix,
                evidence=f"interfaces here: {', '.join(listed) or 'none with an address'}",
            )
        )
    return findings


def check_socket_variables(environment: Mapping[str, str], *, alone: bool, gpus: bool) -> None:
    """Raise ``Impossible`` if an interface variable set by the user cannot work here."""
    for finding in socket_findings(environment, read_interfaces(), alone=alone, gpus=gpus):
        raise Impossible(finding.what, why=f"{finding.why}\n{finding.evidence}", fix=finding.fix)


def _trouble(variable: str, value: str, interfaces: Sequence[Interface], *, alone: bool) -> str:
    """Return why a value cannot work; "" if it can."""
    usable = [known for known in interfaces if known.addresses]
    if variable == NCCL_VARIABLE:
        named = [known for known in usable if _nccl_takes(value, known.name)]
        if not named:
            return "no interface matches it; NCCL would fail with “no socket interface found”"
        return _trouble_with(named, alone)
    if value[0] in "^=":
        return (
            f"{value[0]} is NCCL syntax; gloo expects plain interface names and would look for one "
            f"named {value!r}"
        )
    for name in value.split(","):
        named = [known for known in usable if known.name == name]
        if not named:
            error = f"Unable to find address for: {name}"
            return f"{name} does not exist or has no address; gloo would fail with “{error}”"
        trouble = _trouble_with(named, alone)
        if trouble:
            return trouble
    return ""


def _trouble_with(named: Sequence[Interface], alone: bool) -> str:
    """Return why these interfaces cannot be used; of several, the first that is up is used."""
    working = [interface for interface in named if interface.up]
    if not working:
        return f"{named[0].name} is down"
    if alone:
        return ""
    # NCCL uses the first one for its bootstrap, and does not exclude loopback by itself.
    name = working[0].name
    if working[0].is_loopback:
        return f"{name} is loopback: this host cannot reach other hosts through it"
    if _BRIDGES_WITHIN.match(name):
        return f"{name} is the bridge to the containers or virtual machines on this host, and does not reach other hosts"
    return ""


def _nccl_takes(value: str, name: str) -> bool:
    """Match as NCCL does: name prefixes; ``=`` exact names, ``^`` all except these."""
    leaves_out = value.startswith("^")
    rest = value.removeprefix("^")
    exact = rest.startswith("=")
    words = [word for word in rest.removeprefix("=").split(",") if word]
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return hit != leaves_out
