"""The ports that a host opens for link measurements: the verbs ``serve`` and ``close``.

An ephemeral TCP port at every reachable address; on the first host also the rendezvous port. They
echo what callers send who know the nonce.
"""

import asyncio
import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchmuster.diagnose.links.model import USUAL_PORTS, Interface, Serve, Served, read_message
from torchmuster.errors import MusterError
from torchmuster.launch import protocol
from torchmuster.launch.network import listening

# How long a caller may send nothing.
_PATIENCE_S = 10.0
_PIECE_BYTES = 128 * 1024
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
# By nonce; all ports close with the program.
_open: dict[str, list[listening.OpenPort]] = {}


async def open_service(argument: Any) -> Any:
    """Open ports for callers that know a nonce, until ``close``."""
    request = read_message(Serve, argument)
    ports = [listening.open_port(0, request.address).value]
    rendezvous_port, reason, trouble = None, "", None
    if request.rendezvous:
        try:
            decision = listening.open_port(request.port, request.address)
        except MusterError as error:
            trouble = protocol.Trouble(
                name=error.name, what=error.what, why=error.why, fix=error.fix
            )
        else:
            ports.append(decision.value)
            rendezvous_port, reason = decision.value.port, decision.reason
    for port in ports:
        await port.answer(request.nonce, _echo)
    _open[request.nonce] = ports
    served = Served(
        port=ports[0].port,
        addresses=ports[0].addresses,
        interfaces=interfaces_here(),
        given_out_ports=given_out_ports(),
        rendezvous_port=rendezvous_port,
        rendezvous_reason=reason,
        rendezvous_trouble=trouble,
    )
    return msgspec.to_builtins(served)


async def close_service(argument: Any) -> None:
    """Close the ports of a nonce, if any are open."""
    for port in _open.pop(str(argument["nonce"]), ()):
        await port.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return what a caller sends until it disconnects or times out."""
    with contextlib.suppress(OSError):  # also a timeout
        piece = b"-"
        while piece:
            async with asyncio.timeout(_PATIENCE_S):
                piece = await reader.read(_PIECE_BYTES)
                writer.write(piece)
                await writer.drain()


def interfaces_here() -> tuple[Interface, ...]:
    """Return the interfaces of this host; empty if they are not readable."""
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    interfaces = []
    for name, state in states.items():
        networks = [_network(item) for item in addresses.get(name, ())]
        # If the system reports no flags, one that is up counts as connected.
        flags = state.flags.split(",") if state.flags else ["up", "running"] * state.isup
        interface = Interface(
            name=name,
            up="up" in flags,
            connected="running" in flags,
            mtu_bytes=state.mtu or None,
            networks=tuple(network for network in networks if network is not None),
        )
        interfaces.append(interface)
    return tuple(interfaces)


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
