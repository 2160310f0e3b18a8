"""Name resolution: whether this host resolves its own hostname, and how long lookups take."""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding
from torchmuster.launch.network import interfaces as network

_SLOW_S = 1.0
_NEIGHBOUR = 8  # differs from the own address in this bit


def own_name(surroundings: Surroundings) -> Iterator[Finding]:
    """Resolve this host's hostname, as torch does."""
    name = (surroundings.text("/proc/sys/kernel/hostname") or "").strip() or socket.gethostname()
    candidates = network.interface_candidates()
    best = candidates[0].address if candidates else "ADDRESS"
    hosts_line = f"echo '{best} {name}' | sudo tee -a /etc/hosts"
    began_s = time.monotonic()
    addresses = network.resolve_host(name)
    seconds = time.monotonic() - began_s
    loopback = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    key = ""
    if seconds > _SLOW_S:
        key = "name-lookup-slow"
    elif not addresses:
        key = "name-unresolvable"
    elif len(loopback) == len(addresses):
        key = "name-is-loopback"
    elif not any(network.is_local(address) for address in addresses if address not in loopback):
        key = "name-leads-elsewhere"
    if key:
        yield finding(
            key,
            hostname=name,
            seconds=seconds,
            addresses=", ".join(addresses),
            hosts_line=hosts_line,
        )


def reverse_lookup(surroundings: Surroundings) -> Iterator[Finding]:
    """Look up the names of this host's address and of a neighbour's, as each TCPStore client does."""
    for candidate in network.interface_candidates()[:1]:
        own = ipaddress.ip_address(candidate.address)
        # /etc/hosts often has the own address but not those of the other hosts; this one is in the same network.
        neighbour = type(own)(int(own) ^ _NEIGHBOUR)
        for address in (own, neighbour):
            began_s = time.monotonic()
            with contextlib.suppress(OSError):
                socket.getnameinfo((str(address), 0), socket.NI_NAMEREQD)
            seconds = time.monotonic() - began_s
            if seconds > _SLOW_S:
                yield finding("reverse-lookup-slow", address=address, seconds=seconds)
                return


CHECKS = (
    Check(
        name="own-name",
        asks="Does this host's hostname resolve to its own address?",
        run=own_name,
    ),
    Check(name="reverse-lookup", asks="Are reverse lookups fast?", run=reverse_lookup),
)
