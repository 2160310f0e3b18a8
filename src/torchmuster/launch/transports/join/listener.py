"""The host's listening sockets: on the addresses that were given and no others, all with one port."""

import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence

from torchmuster.errors import Impossible, NotNow

_BACKLOG = 4096
# A client of TLS speaks first. Until it does, or so long, Linux keeps it to itself.
_SILENCE_S = 5
# With any port: how often to begin anew if another address has the port in use.
_TRIES = 20


def listen(addresses: Sequence[str], port: int | None) -> list[socket.socket]:
    """Return a socket for each address. None as the port means any that is free on all of them."""
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
    # asyncio sends small messages at once (TCP_NODELAY) only if it is told that this is TCP.
    made = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where it would let others take the port
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
        return Impossible(f"{address!r} is not an address", why="machines join at an IP address")
    if error.errno == errno.EADDRINUSE:
        return NotNow(
            f"port {port} is in use on {address}",
            why="another program listens there",
            fix=f"ss -ltnp 'sport = :{port}'  # shows which; or leave out the port to have any",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return Impossible(
            f"{address} is not an address of this machine",
            why="the host listens only on addresses of its own",
            fix="ip -brief address  # shows them",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Impossible(
            f"port {port} may not be used by this user",
            why=str(error.strerror),
            fix="choose a port above 1023",
        )
    return Impossible(f"cannot listen on {address}", why=str(error))


def in_codes(addresses: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the addresses that are worth writing into a code, best first.

    A link-local address means nothing without the other machine's own interface.
    """
    useful = [one for one in reachable(addresses) if not ipaddress.ip_address(one).is_link_local]
    return tuple(useful[:most])


def reachable(addresses: Sequence[str]) -> list[str]:
    """Leave out loopback, which leads others to themselves, unless there is nothing else."""
    outside = [one for one in addresses if not ipaddress.ip_address(one).is_loopback]
    return outside or list(addresses)
