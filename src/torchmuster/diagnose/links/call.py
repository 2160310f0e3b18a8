"""Call other hosts: test the connection, or measure the link.

A measurement sends small messages, then growing transfers in each direction until one takes long
enough to be timed; a healthy link takes less than 2 s.
"""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchmuster.diagnose.links import transfer
from torchmuster.diagnose.links.messages import (
    Call,
    Called,
    Result,
    Target,
    encode_message,
    read_message,
)
from torchmuster.diagnose.links.model import DROPPED, Figures
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


async def call(argument: Any) -> Any:
    """Call all targets in parallel, or measure the links to them one after the other."""
    request = read_message(Call, argument)
    interfaces = network_interfaces.read_interfaces()
    if request.measure:
        results = [await _measure(target, request, interfaces) for target in request.targets]
    else:
        tries = (_reach(target, request, interfaces) for target in request.targets)
        results = list(await asyncio.gather(*tries))
    return encode_message(Called(results=tuple(results)))


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
                trips_s = await _pings(connection)
                there = await _timed(connection, transfer.TAKE, block)
            # A stalled connection is unusable, so the reverse direction has its own.
            again, connection = await _connect(target, request, interfaces)
            if connection is None:
                raise ConnectionError(again.problem)
            with connection:
                back = await _timed(connection, transfer.GIVE, block)
    except TimeoutError:  # may be caused by a busy host
        return _with_problem(result, "timeout")
    except OSError:
        return _with_problem(result, DROPPED)
    trips = tuple(trips_s)
    return Result(
        problem="",
        seconds=result.seconds,
        local=result.local,
        there=replace(there, round_trips_s=trips),
        back=replace(back, round_trips_s=trips),
    )


def _with_problem(result: Result, problem: str) -> Result:
    """Return a result with another problem."""
    return Result(problem=problem, seconds=result.seconds, local=result.local)


async def _pings(connection: socket.socket) -> list[float]:
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
    return trips_s


async def _timed(connection: socket.socket, verb: bytes, block: bytes) -> Figures:
    """Transfer growing amounts of data until one takes long enough to be timed."""
    size, wrong = _FIRST_BYTES, 0
    figures = Figures(stalled=True)
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                received, waited_s = await _transfer(connection, verb, size, block)
        except TimeoutError:
            break
        seconds = max(received.seconds, 1e-6)
        wrong += received.wrong_bytes
        figures = Figures(bytes_per_s=size / seconds, waited_share=min(1.0, waited_s / seconds))
        if received.seconds >= _LONG_ENOUGH_S or size == transfer.MOST_BYTES:
            break
        size = min(size * _GROWTH, transfer.MOST_BYTES)
    return replace(figures, wrong_bytes=wrong)


async def _transfer(
    connection: socket.socket, verb: bytes, size: int, block: bytes
) -> tuple[transfer.Transfer, float]:
    """Return the receiver's result, and the longer CPU wait of the two ends."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, transfer.HEADER.pack(verb, size))
    if verb == transfer.TAKE:
        mine = await transfer.send_blocks(connection, size, block)
    else:
        mine = await transfer.receive_blocks(connection, size, block)
    report = await transfer.read_exactly(connection, transfer.REPORT_BYTES)
    theirs = transfer.unpacked(report)
    receiver = theirs if verb == transfer.TAKE else mine
    return receiver, max(mine.waited_s, theirs.waited_s)


async def _connect(
    target: Target, request: Call, interfaces: Sequence[Interface]
) -> tuple[Result, socket.socket | None]:
    reached, connection = await reach.connect_to(
        protocol.Target(address=target.address, port=target.port),
        request.nonce,
        timeout_s=request.timeout_s,
        interfaces=interfaces,
    )
    problem = reached.problem
    if problem == "unreachable" and not _has_route(target.address):
        problem = "no-route"
    elif problem == "unreachable":
        problem = "prohibited" if reached.seconds < _AT_ONCE_S else "absent"
    return Result(problem=problem, seconds=reached.seconds, local=reached.local), connection


def _has_route(address: str) -> bool:
    """Return whether this host has a route to an address, without sending a packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
        except OSError:
            return False
    return True
