"""The ports that a host opens for link measurements: the verbs ``serve`` and ``close``.

An ephemeral TCP port at every reachable address; on the first host also the rendezvous port.
Callers must know the nonce, requests are limited in size, and all ports close after a timeout.
"""

import asyncio
import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchmuster.diagnose.links import transfer
from torchmuster.diagnose.links.model import USUAL_PORTS, Interface, Serve, Served, read_message
from torchmuster.errors import MusterError
from torchmuster.launch import protocol
from torchmuster.launch.network import listening

_MOST_S = 600.0
# Timeout of one request of a caller, and between two.
_PATIENCE_S = 10.0
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
# By nonce: the open ports, and the timer that closes them.
_open: dict[str, tuple["Service", asyncio.TimerHandle]] = {}
_closing: set[asyncio.Task[None]] = set()


class Service:
    """The open ports of one host."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._block = transfer.block_of(nonce)
        self._ports: list[listening.OpenPort] = []

    async def open(self, request: Serve) -> Served:
        """Open the ports."""
        port = self._listen(0, request.address).value
        meeting = reason = trouble = None
        if request.meeting:
            try:
                decision = self._listen(request.port, request.address)
                meeting, reason = decision.value.port, decision.reason
            except MusterError as error:
                trouble = protocol.Trouble(
                    name=error.name, what=error.what, why=error.why, fix=error.fix
                )
        return Served(
            port=port.port,
            addresses=port.addresses,
            interfaces=interfaces_here(),
            given_out_ports=given_out_ports(),
            meeting_port=meeting,
            meeting_reason=reason or "",
            meeting_trouble=trouble,
        )

    async def close(self) -> None:
        """Close everything."""
        await asyncio.gather(*(port.close() for port in self._ports))
        self._ports = []

    def _listen(self, port: int | None, address: str | None) -> Any:
        decision = listening.open_port(port, address)
        self._ports.append(decision.value)
        decision.value.answer(self._nonce, self._talk)
        return decision

    async def _talk(self, connection: socket.socket) -> None:
        """Serve a caller's requests until it disconnects or times out."""
        with contextlib.suppress(OSError, TimeoutError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                async with asyncio.timeout(_PATIENCE_S):
                    header = await transfer.read_exactly(connection, transfer.HEADER.size)
                    verb, count = transfer.HEADER.unpack(header)
                    if count > transfer.MOST_BYTES:
                        return
                    await self._do(connection, verb, count)

    async def _do(self, connection: socket.socket, verb: bytes, count: int) -> None:
        loop = asyncio.get_running_loop()
        if verb == transfer.PING:
            message = await transfer.read_exactly(connection, transfer.PING_BYTES)
            await loop.sock_sendall(connection, message)
        elif verb == transfer.TAKE:
            await transfer.receive_blocks(connection, count, self._block)
        elif verb == transfer.GIVE:
            await transfer.send_blocks(connection, count, self._block)
        else:
            raise ConnectionError("unknown request")


async def open_service(argument: Any) -> Any:
    """Open ports for callers that know a nonce, until ``close`` or a timeout."""
    request = read_message(Serve, argument)
    service = Service(request.nonce)
    try:
        served = await service.open(request)
    except BaseException:
        await service.close()
        raise
    timer = asyncio.get_running_loop().call_later(
        min(request.for_s, _MOST_S), _close_later, request.nonce
    )
    _open[request.nonce] = service, timer
    return msgspec.to_builtins(served)


async def close_service(argument: Any) -> None:
    """Close the ports of a nonce, if any are open."""
    opened = _open.pop(str(argument["nonce"]), None)
    if opened is not None:
        service, timer = opened
        timer.cancel()
        await service.close()


def _close_later(nonce: str) -> None:
    task = asyncio.ensure_future(close_service({"nonce": nonce}))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


def interfaces_here() -> tuple[Interface, ...]:
    """Return the interfaces of this host; empty if they are not readable."""
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    interfaces = []
    for name, state in states.items():
        networks = [_network(item) for item in addresses.get(name, ())]
        interface = Interface(
            name=name,
            up=_flag(state, "up"),
            connected=_flag(state, "running"),
            mtu_bytes=state.mtu or None,
            networks=tuple(network for network in networks if network is not None),
        )
        interfaces.append(interface)
    return tuple(interfaces)


def _flag(state: Any, name: str) -> bool:
    """Return a flag of an interface; if the system reports no flags, return whether it is up."""
    flags = getattr(state, "flags", "")
    return name in flags.split(",") if flags else bool(state.isup)


def _network(item: Any) -> str | None:
    if item.family not in (socket.AF_INET, socket.AF_INET6) or not item.netmask:
        return None
    mask = item.netmask
    try:
        if item.family == socket.AF_INET6:  # ipaddress does not parse IPv6 netmasks
            mask = int(ipaddress.IPv6Address(mask.partition("/")[0])).bit_count()
        return str(ipaddress.ip_interface(f"{item.address.partition('%')[0]}/{mask}"))
    except ValueError:
        return None


def given_out_ports() -> tuple[int, int]:
    """Return the first and last ephemeral port of this system."""
    try:
        first, last = map(int, _GIVEN_OUT.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return USUAL_PORTS
    return first, last
