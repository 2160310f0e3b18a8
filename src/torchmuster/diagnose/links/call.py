"""Call other hosts: test the connection, or measure the link.

A measurement sends small messages, then growing transfers in each direction until one takes long
enough to be timed; a healthy link takes less than 2 s.
"""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from torchmuster.diagnose.links import transfer
from torchmuster.diagnose.links.model import (
    Call,
    Called,
    Figures,
    Problem,
    Result,
    Target,
    read_message,
)
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network import reach
from torchmuster.launch.network.interfaces import Interface

# Timeout of one measurement.
LIMIT_S = 10.0
# The first transfer is small enough to finish within this time on any network.
STALLED_S = 1.5
_PINGS, _FEWEST_PINGS, _PINGING_S, _PING_S = 30, 5, 0.6, 2.0
_FIRST_BYTES, _GROWTH, _LONG_ENOUGH_S = 128 * 1024, 4, 0.08
# A firewall rejects at once; the kernel reports an absent host after 3 s.
_AT_ONCE_S = 0.7
_ANY_PORT = 9  # no packet is sent to it


async def call(argument: Any) -> Any:
    """Call all targets in parallel, or measure the links to them one after the other."""
    request = read_message(Call, argument)
    interfaces = network_interfaces.read_interfaces()
    if request.measure:
        results = [await _measure(target, request, interfaces) for target in request.targets]
    else:
        tries = (_reach(target, request, interfaces) for target in request.targets)
        results = list(await asyncio.gather(*tries))
    return msgspec.to_builtins(Called(results=tuple(results)))


async def _reach(target: Target, request: Call, interfaces: Sequence[Interface]) -> Result:
    result, connection = await _connect(target, request, interfaces)
    if connection is not None:
        connection.close()
    return result


async def _measure(target: Target, request: Call, interfaces: Sequence[Interface]) -> Result:
    block = transfer.block_of(request.nonce)
    result, connection = await _connect(target, request, interfaces)
    if connection is None:
        return result
    try:
        async with asyncio.timeout(LIMIT_S):
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                trip_s = await _round_trip(connection)
                there = await _speed(connection, transfer.TAKE, block, trip_s)
            # A stalled connection is unusable, so the reverse direction has its own.
            again, connection = await _connect(target, request, interfaces)
            if connection is None:
                return again
            with connection:
                back = await _speed(connection, transfer.GIVE, block, trip_s)
    except TimeoutError:  # may be caused by a busy host
        return msgspec.structs.replace(result, problem=Problem.TIMEOUT)
    except OSError:
        return msgspec.structs.replace(result, problem=Problem.DROPPED)
    return msgspec.structs.replace(result, there=there, back=back)


async def _round_trip(connection: socket.socket) -> float:
    """Return the shortest round trip of small messages."""
    loop = asyncio.get_running_loop()
    message = transfer.HEADER.pack(transfer.PING, 0) + os.urandom(transfer.PING_BYTES)
    trips_s: list[float] = []
    until = time.monotonic() + _PINGING_S
    while len(trips_s) < _PINGS and (len(trips_s) < _FEWEST_PINGS or time.monotonic() < until):
        began = time.monotonic()
        async with asyncio.timeout(_PING_S):
            await loop.sock_sendall(connection, message)
            await transfer.read_exactly(connection, transfer.PING_BYTES)
        trips_s.append(time.monotonic() - began)
    return min(trips_s)


async def _speed(
    connection: socket.socket, verb: bytes, block: bytes, round_trip_s: float
) -> Figures:
    """Transfer growing amounts of data until one takes long enough to be timed."""
    loop = asyncio.get_running_loop()
    move = transfer.send_blocks if verb == transfer.TAKE else transfer.receive_blocks
    size, wrong = _FIRST_BYTES, 0
    bytes_per_s, waited_share = None, 0.0
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                await loop.sock_sendall(connection, transfer.HEADER.pack(verb, size))
                moved = await move(connection, size, block)
        except TimeoutError:
            break
        wrong += moved.wrong_bytes
        bytes_per_s = size / max(moved.seconds, 1e-6)
        waited_share = min(1.0, moved.waited_s / max(moved.seconds, 1e-6))
        if moved.seconds >= _LONG_ENOUGH_S or size == transfer.MOST_BYTES:
            break
        size = min(size * _GROWTH, transfer.MOST_BYTES)
    return Figures(
        bytes_per_s=bytes_per_s,
        round_trip_s=round_trip_s,
        stalled=bytes_per_s is None,
        wrong_bytes=wrong,
        waited_share=waited_share,
    )


async def _connect(
    target: Target, request: Call, interfaces: Sequence[Interface]
) -> tuple[Result, socket.socket | None]:
    reached, connection = await reach.connect_to(
        protocol.Target(address=target.address, port=target.port),
        request.nonce,
        timeout_s=request.timeout_s,
        interfaces=interfaces,
    )
    if reached.problem != "unreachable":
        problem = Problem(reached.problem)
    elif not _has_route(target.address):
        problem = Problem.NO_ROUTE
    elif reached.seconds < _AT_ONCE_S:
        problem = Problem.PROHIBITED
    else:
        problem = Problem.ABSENT
    return Result(problem=problem, seconds=reached.seconds), connection


def _has_route(address: str) -> bool:
    """Return whether this host has a route to an address, without sending a packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, _ANY_PORT))
        except OSError:
            return False
    return True
