"""The host's listening sockets: only on the given addresses, all with the same port."""

import asyncio
import errno
import hashlib
import ipaddress
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.network.interfaces import interface_candidates

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

_BACKLOG = 4096
# A TLS client sends first. Linux holds the connection back until it does, or for this long.
_SILENCE_S = 5
# Without a fixed port: how often to retry if the port is in use on another address.
_TRIES = 20


def open_listeners(addresses: Sequence[str], port: int | None) -> list[socket.socket]:
    """Return a socket for each address. With port None, use any port that is free on all of them."""
    for _ in range(_TRIES):
        sockets: list[socket.socket] = []
        try:
            for address in addresses:
                chosen = sockets[0].getsockname()[1] if sockets else port or 0
                sockets.append(_bound(address, chosen))
            return sockets
        except OSError as error:
            for one in sockets:
                one.close()
            if error.errno != errno.EADDRINUSE or port:
                raise _explained(error, address, port) from error
    raise NotNow(
        f"no port is free on all of {', '.join(addresses)}", why=f"{_TRIES} ports were tried"
    )


def _bound(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    # asyncio sets TCP_NODELAY only if the socket's protocol is given as TCP.
    made = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where this option would let other programs take the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if sys.platform == "linux":
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENCE_S)
        made.bind(target)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _explained(error: OSError, address: str, port: int | None) -> Exception:
    if isinstance(error, socket.gaierror):
        return Impossible(
            f"{address!r} is not an IP address", why="muster host listens on IP addresses"
        )
    if error.errno == errno.EADDRINUSE:
        return NotNow(
            f"port {port} is in use on {address}",
            why="another program listens there",
            fix=f"ss -ltnp 'sport = :{port}'  # shows which; or omit the port to use any free one",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return Impossible(
            f"{address} is not an address of this host",
            why="muster host can only listen on this host's own addresses",
            fix="ip -brief address  # lists them",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Impossible(
            f"this user is not allowed to use port {port}",
            why=str(error.strerror),
            fix="choose a port above 1023",
        )
    return Impossible(f"cannot listen on {address}", why=str(error))


def in_codes(addresses: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the addresses to put into a code, best first.

    A link-local address is useless without the other machine's own interface.
    """
    useful = [one for one in reachable(addresses) if not ipaddress.ip_address(one).is_link_local]
    return tuple(useful[:most])


def reachable(addresses: Sequence[str]) -> list[str]:
    """Return the addresses without loopback, unless there is no other."""
    outside = [one for one in addresses if not ipaddress.ip_address(one).is_loopback]
    return outside or list(addresses)


SERVICE_TYPE = "_torchmuster._tcp.local."
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class HostFound:
    """The addresses and port that the host announced."""

    addresses: tuple[str, ...]
    port: int


def announced_id(fingerprint: bytes) -> str:
    """Return the opaque name under which the host with this certificate announces itself."""
    return hashlib.sha256(b"torchmuster join\0" + fingerprint).hexdigest()[:24]


async def announce(fingerprint: bytes, *, port: int, addresses: Sequence[str]) -> None:
    """Announce the host at these addresses until cancelled, then withdraw the announcement."""
    outside = reachable(addresses)
    multicast = _multicast(outside)
    from zeroconf import ServiceInfo

    name = announced_id(fingerprint)
    service = ServiceInfo(
        SERVICE_TYPE,
        f"{name}.{SERVICE_TYPE}",
        port=port,
        parsed_addresses=[one.partition("%")[0] for one in outside],
        server=f"{name}.local.",
    )
    try:
        # The name is unique, so a conflict check is not needed.
        await multicast.async_register_service(service, cooperating_responders=True)
        await asyncio.get_running_loop().create_future()  # until cancelled
    finally:
        await multicast.async_unregister_all_services()
        await multicast.async_close()


async def find_hosts(fingerprint: bytes, *, timeout_s: float) -> HostFound | None:
    """Look for the host with this certificate; None if it does not answer in time."""
    # Not on all interfaces: a host with containers has many, which come and go.
    multicast = _multicast([*(one.address for one in interface_candidates()), _LOOPBACK])
    from zeroconf.asyncio import AsyncServiceInfo

    service = AsyncServiceInfo(SERVICE_TYPE, f"{announced_id(fingerprint)}.{SERVICE_TYPE}")
    try:
        if not await service.async_request(multicast.zeroconf, timeout_s * 1000):
            return None
        addresses = tuple(service.parsed_scoped_addresses())
        return HostFound(addresses=addresses, port=service.port) if service.port else None
    finally:
        await multicast.async_close()


def _multicast(addresses: Sequence[str]) -> "AsyncZeroconf":
    """Join the multicast groups on the interfaces of these addresses."""
    try:
        from zeroconf.asyncio import AsyncZeroconf
    except ImportError as error:
        raise Impossible(
            "cannot discover the host: the package zeroconf is not installed",
            why="it is needed to find the host on the local network without an address",
            fix="pip install 'torchmuster[join]'",
        ) from error
    return AsyncZeroconf(interfaces=list(addresses))
