"""Call other hosts: test the connections, or measure the links with echoes of known bytes.

A measurement sends small messages, then blocks of data for less than a second.
"""

import asyncio
import os
import socket
import time
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import Call, Figures, Problem, Result, read_message
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network import reach

# Timeout of one measurement.
LIMIT_S = 10.0
# The first transfer is small enough to finish within this time on any network.
STALLED_S = 1.5
_PING_S = 2.0
_PINGS, _PING_BYTES = 10, 64
# Blocks are echoed one by one on a slow link, else several at a time.
_BLOCK_BYTES, _COUNT, _LONG_S = 128 * 1024, 8, 0.08
_MEASURED_S = 0.4
# A firewall rejects at once; the kernel reports an absent host after 3 s.
_AT_ONCE_S = 0.7
_ANY_PORT = 9  # no packet is sent to it


async def call(argument: Any) -> Any:
    """Call all targets in parallel; return a result for each."""
    request = read_message(Call, argument)
    interfaces = network_interfaces.read_interfaces()

    async def call_target(target: protocol.Target) -> Result:
        reached, connection = await reach.connect_to(
            target, request.nonce, timeout_s=request.timeout_s, interfaces=interfaces
        )
        figures = None
        if connection is not None:
            if request.measure:
                figures = await _measure(connection)
            connection[1].close()
        return Result(problem=_problem(reached), seconds=reached.seconds, figures=figures)

    results = await asyncio.gather(*map(call_target, request.targets))
    return msgspec.to_builtins(results)


def _problem(reached: protocol.ReachResult) -> Problem:
    if reached.problem != "unreachable":
        return Problem(reached.problem)
    if not local_end(reached.target.address):
        return Problem.NO_ROUTE
    return Problem.PROHIBITED if reached.seconds < _AT_ONCE_S else Problem.ABSENT


def local_end(address: str) -> str:
    """Return the source address for packets to this address, "" without a route; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, _ANY_PORT))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


async def _measure(connection: reach.Connection) -> Figures:
    """Measure the round trip, the speed and the wrong bytes; stop where nothing passes any more."""
    message, block = os.urandom(_PING_BYTES), os.urandom(_BLOCK_BYTES)
    trips_s: list[float] = []
    bytes_per_s, wrong_bytes = None, 0
    try:
        async with asyncio.timeout(LIMIT_S):
            for _ in range(_PINGS):
                seconds, wrong = await _echo(connection, message, 1, _PING_S)
                trips_s.append(seconds)
                wrong_bytes += wrong
            seconds, wrong = await _echo(connection, block, 1, STALLED_S)
            bytes_per_s = len(block) / seconds
            wrong_bytes += wrong
            count = _COUNT if seconds < _LONG_S else 1
            spent_s, moved = 0.0, 0
            while spent_s < _MEASURED_S:
                seconds, wrong = await _echo(connection, block, count, STALLED_S)
                spent_s, moved = spent_s + seconds, moved + count * len(block)
                bytes_per_s = moved / spent_s
                wrong_bytes += wrong
    except OSError:  # also a timeout
        pass
    return Figures(
        bytes_per_s=bytes_per_s,
        round_trip_s=min(trips_s, default=None),
        wrong_bytes=wrong_bytes,
    )


async def _echo(
    connection: reach.Connection, block: bytes, count: int, within_s: float
) -> tuple[float, int]:
    """Send a block ``count`` times while receiving its echoes; return the seconds and wrong bytes."""
    began = time.monotonic()
    reader, writer = connection
    sending = asyncio.create_task(_send(writer, block, count))
    try:
        async with asyncio.timeout(within_s):
            wrong_bytes = await _receive(reader, block, count)
            await sending
    finally:
        sending.cancel()
    return time.monotonic() - began, wrong_bytes


async def _send(writer: asyncio.StreamWriter, block: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(block)
        await writer.drain()


async def _receive(reader: asyncio.StreamReader, block: bytes, count: int) -> int:
    """Receive the block so many times; return how many bytes were wrong."""
    received = wrong_bytes = 0
    while received < count * len(block):
        offset = received % len(block)
        piece = await reader.read(len(block) - offset)
        if not piece:
            raise ConnectionError("the peer closed the connection")
        expected = block[offset : offset + len(piece)]
        if piece != expected:
            pairs = zip(piece, expected, strict=True)
            wrong_bytes += sum(byte != sent for byte, sent in pairs)
        received += len(piece)
    return wrong_bytes
