"""Measure one link from the calling host: both directions, in 2 s if the link is healthy.

Round trips of small messages, datagrams (``datagrams.py``), then growing transfers in each
direction, until one takes long enough to be timed.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from torchmuster.diagnose.links import datagrams
from torchmuster.diagnose.links.messages import Target
from torchmuster.diagnose.links.model import Figures
from torchmuster.launch import protocol

# Timeout of the whole measurement.
LIMIT_S = 10.0
_PINGS, _FEWEST_PINGS, _PINGING_S, _PING_S = 30, 5, 0.6, 2.0
_FIRST_BYTES, _GROWTH, _LONG_ENOUGH_S = 128 * 1024, 4, 0.08
# The first transfer is small enough to finish within this time on any network.
STALLED_S = 1.5
_RETRANSMITS = slice(100, 104)  # tcpi_total_retrans in Linux's struct tcp_info

Reconnect = Callable[[], Awaitable[socket.socket]]


async def measure_link(
    target: Target,
    nonce: str,
    *,
    reconnect: Reconnect,
    local: protocol.Address,
    own_frame_bytes: int | None,
    datagram_count: int,
) -> tuple[Figures, Figures]:
    """Return the figures of both directions; raise ``OSError`` if the connection is lost.

    ``reconnect`` returns a new connection to the target, on which the nonce has been sent.
    """
    block = datagrams.block_of(nonce)
    async with asyncio.timeout(LIMIT_S):
        with await reconnect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips_s = await _pings(connection)
            there, back = await _sound(
                connection,
                target,
                nonce,
                local=local.address,
                count=datagram_count,
                round_trip_s=min(trips_s),
                frames_bytes=(own_frame_bytes, target.frame_bytes),
            )
            there = await _measure_timed(there, connection, datagrams.TAKE, block)
            there = replace(there, retransmits=_retransmits(connection))
        # A stalled connection is unusable, so the reverse direction has its own.
        with await reconnect() as connection:
            back = await _measure_timed(back, connection, datagrams.GIVE, block)
    return (
        replace(there, round_trips_s=tuple(trips_s)),
        replace(back, round_trips_s=tuple(trips_s)),
    )


async def _pings(connection: socket.socket) -> list[float]:
    loop = asyncio.get_running_loop()
    message = datagrams.HEADER.pack(datagrams.PING, 0) + os.urandom(datagrams.PING_BYTES)
    trips_s: list[float] = []
    until = time.monotonic() + _PINGING_S
    while len(trips_s) < _PINGS and (len(trips_s) < _FEWEST_PINGS or time.monotonic() < until):
        began = time.monotonic()
        async with asyncio.timeout(_PING_S):
            await loop.sock_sendall(connection, message)
            await datagrams.read_exactly(connection, datagrams.PING_BYTES)
        trips_s.append(time.monotonic() - began)
    return trips_s


async def _sound(
    connection: socket.socket,
    target: Target,
    nonce: str,
    *,
    local: str,
    count: int,
    round_trip_s: float,
    frames_bytes: tuple[int | None, int | None],
) -> tuple[Figures, Figures]:
    async def ask_count(series: bytes) -> int:
        request = datagrams.HEADER.pack(datagrams.COUNT, 0) + series
        await asyncio.get_running_loop().sock_sendall(connection, request)
        answer = await datagrams.read_exactly(connection, datagrams.HEADER.size)
        return int(datagrams.HEADER.unpack(answer)[1])

    if target.udp_port is None:
        return Figures(), Figures()
    try:
        found = await datagrams.probe_datagrams(
            target.address,
            target.udp_port,
            nonce,
            local=local,
            count=count,
            round_trip_s=round_trip_s,
            frames_bytes=frames_bytes,
            ask_count=ask_count,
        )
    except ConnectionRefusedError:  # datagrams are refused; possibly only TCP is allowed
        return Figures(), Figures()
    if not found.returned:
        return Figures(), Figures()
    return (
        Figures(
            sent=found.sent,
            lost=found.sent - min(found.arrived, found.sent),
            frame_tried_bytes=frames_bytes[0],
            frame_bytes=found.frame_there_bytes,
        ),
        Figures(
            sent=max(found.arrived, found.returned),
            lost=max(0, found.arrived - found.returned),
            frame_tried_bytes=frames_bytes[1],
            frame_bytes=found.frame_back_bytes,
        ),
    )


async def _measure_timed(
    figures: Figures, connection: socket.socket, verb: bytes, block: bytes
) -> Figures:
    """Transfer growing amounts of data until one takes long enough to be timed."""
    size, wrong = _FIRST_BYTES, 0
    rate: float | None = None
    waited_share = 0.0
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                received, waited_s = await _transfer(connection, verb, size, block)
        except TimeoutError:
            break
        wrong += received.wrong_bytes
        rate = size / max(received.seconds, 1e-6)
        waited_share = min(1.0, waited_s / max(received.seconds, 1e-6))
        if received.seconds >= _LONG_ENOUGH_S or size == datagrams.MOST_BYTES:
            break
        size = min(size * _GROWTH, datagrams.MOST_BYTES)
    return replace(
        figures,
        bytes_per_s=rate,
        stalled=rate is None,
        wrong_bytes=wrong,
        waited_share=waited_share,
    )


async def _transfer(
    connection: socket.socket, verb: bytes, size: int, block: bytes
) -> tuple[datagrams.Transfer, float]:
    """Return the receiver's result, and the longer CPU wait of the two ends."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, datagrams.HEADER.pack(verb, size))
    if verb == datagrams.TAKE:
        mine = await datagrams.send_blocks(connection, size, block)
        theirs = datagrams.unpacked(
            await datagrams.read_exactly(connection, datagrams.REPORT_BYTES)
        )
        return theirs, max(mine.waited_s, theirs.waited_s)
    mine = await datagrams.receive_blocks(connection, size, block)
    theirs = datagrams.unpacked(await datagrams.read_exactly(connection, datagrams.REPORT_BYTES))
    return mine, max(mine.waited_s, theirs.waited_s)


def _retransmits(connection: socket.socket) -> int | None:
    """Return the number of retransmitted segments; None if the system does not report it."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    with contextlib.suppress(OSError):
        told = connection.getsockopt(socket.IPPROTO_TCP, option, _RETRANSMITS.stop)
        if len(told) >= _RETRANSMITS.stop:
            return int.from_bytes(told[_RETRANSMITS], sys.byteorder)
    return None
