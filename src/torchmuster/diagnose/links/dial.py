"""What a host does while links are tested (verbs of ``host_probe.py``): open ports, dial others, echo.

It opens an ephemeral TCP port at every address that others may reach, and on the first host also the
rendezvous port. Callers that know the nonce get back what they send.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import (
    USUAL_PORTS,
    Dial,
    Dialed,
    Open,
    Opened,
    Problem,
    Speed,
)
from torchmuster.errors import MusterError
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network import listening, reach

# Timeout of one measurement.
LIMIT_S = 10.0
# The first transfer is small enough to finish within this time on any network.
STALLED_S = 1.5
# Blocks are echoed one by one on a slow link, else several at a time.
_BLOCK_BYTES, _COUNT, _LONG_S = 128 * 1024, 8, 0.08
_MEASURED_S = 0.4
# How long a caller may send nothing.
_PATIENCE_S = 10.0
# A firewall rejects at once; the kernel reports an absent host after 3 s.
_AT_ONCE_S = 0.7
_ANY_PORT = 9  # no packet is sent to it
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# By nonce; all ports close with the program.
_open: dict[str, list[listening.OpenPort]] = {}


async def open_ports(argument: Any) -> Any:
    """Open ports for callers that know a nonce, until ``close_ports``."""
    request = msgspec.convert(argument, Open)
    ports = [listening.open_port(0, request.address).value]
    rendezvous_port = None
    if request.rendezvous:
        with contextlib.suppress(MusterError):  # in use: this host's own check names the holder
            ports.append(listening.open_port(request.port, request.address).value)
            rendezvous_port = ports[-1].port
    for port in ports:
        await port.answer(request.nonce, _echo_all)
    _open[request.nonce] = ports
    opened = Opened(
        port=ports[0].port,
        addresses=ports[0].addresses,
        ephemeral_ports=_read_ephemeral_ports(),
        rendezvous_port=rendezvous_port,
    )
    return msgspec.to_builtins(opened)


async def close_ports(argument: Any) -> None:
    """Close the ports of a nonce, if any are open."""
    for port in _open.pop(str(argument), ()):
        await port.close()


async def dial(argument: Any) -> Any:
    """Dial all targets in parallel; return a result for each."""
    request = msgspec.convert(argument, Dial)
    interfaces = network_interfaces.read_interfaces()
    calls = [_dial(target, request, interfaces) for target in request.targets]
    return msgspec.to_builtins(await asyncio.gather(*calls))


async def _dial(
    target: protocol.Target, request: Dial, interfaces: Sequence[network_interfaces.Interface]
) -> Dialed:
    reached, connection = await reach.connect_to(
        target, request.nonce, timeout_s=request.timeout_s, interfaces=interfaces
    )
    speed = None
    if connection is not None:
        if request.measure:
            speed = await _measure(connection)
        connection[1].close()
    source_address = _source_address(target.address)
    problem = reached.problem
    if problem == "unreachable":
        problem = Problem.PROHIBITED if reached.seconds < _AT_ONCE_S else Problem.ABSENT
        if not source_address:
            problem = Problem.NO_ROUTE
    return Dialed(
        problem=Problem(problem),
        seconds=reached.seconds,
        source_address=source_address,
        speed=speed,
    )


def _source_address(address: str) -> str:
    """Return the source address for packets to this address, "" without a route; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, _ANY_PORT))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


async def _measure(connection: reach.Connection) -> Speed:
    """Measure speed and wrong bytes; stop where nothing passes any more."""
    block = os.urandom(_BLOCK_BYTES)
    bytes_per_s, wrong_bytes = None, 0
    with contextlib.suppress(OSError):  # also a timeout
        async with asyncio.timeout(LIMIT_S):
            seconds, wrong_bytes = await _echo(connection, block)
            bytes_per_s = len(block) / seconds
            data = block * (_COUNT if seconds < _LONG_S else 1)
            spent_s, moved = 0.0, 0
            while spent_s < _MEASURED_S:
                seconds, wrong = await _echo(connection, data)
                wrong_bytes += wrong
                spent_s += seconds
                moved += len(data)
                bytes_per_s = moved / spent_s
    return Speed(bytes_per_s=bytes_per_s, wrong_bytes=wrong_bytes)


async def _echo(connection: reach.Connection, data: bytes) -> tuple[float, int]:
    """Send data while receiving its echo; return the seconds and the number of wrong bytes."""
    reader, writer = connection
    began = time.monotonic()
    sending = asyncio.create_task(_send(writer, data))
    echo = bytearray()
    try:
        async with asyncio.timeout(STALLED_S):
            while len(echo) < len(data):
                echo += await _receive(reader, len(data) - len(echo))
            await sending
    finally:
        sending.cancel()
    seconds = time.monotonic() - began
    if echo == data:
        return seconds, 0
    return seconds, sum(got != sent for got, sent in zip(echo, data, strict=True))


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader, most: int) -> bytes:
    piece = await reader.read(most)
    if not piece:
        raise ConnectionError("the peer closed the connection")
    return piece


async def _echo_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return what a caller sends until it disconnects or times out."""
    with contextlib.suppress(OSError):  # also a timeout
        while True:
            async with asyncio.timeout(_PATIENCE_S):
                await _send(writer, await _receive(reader, _BLOCK_BYTES))


def _read_ephemeral_ports() -> tuple[int, int]:
    """Return the first and last ephemeral port of this system."""
    try:
        first, last = map(int, _EPHEMERAL_PORTS.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return USUAL_PORTS
    return first, last
