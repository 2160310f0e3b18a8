"""Datagrams between two hosts: measure packet loss and the largest frame size.

TCP hides both: it retransmits lost packets, and reports no error where large frames are dropped.
These datagrams must not be fragmented, so a frame that is too large does not arrive. Only senders
that know the nonce get an answer.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# Common frame sizes to try, in addition to the MTU of the interface.
USUAL_FRAMES = (9000, 4000, 1500, 1492, 1480, 1460, 1450, 1420, 1400, 1380, 1350, 1300, 1280, 1000)
_ECHO, _WANT, _REPLY = b"e", b"w", b"r"
# Token, kind, series, number, size.
_HEAD = struct.Struct("!16sc8sII")
_SMALL_BYTES = 64
_MOST_BYTES = 65507
MOST_FRAME_BYTES = _MOST_BYTES + 28
_SERIES_KEPT = 256
_IN_A_ROW, _PAUSE_S = 10, 0.001
# Timeout of an answer on a busy host; longer if the round trip is long.
_PATIENCE_S, _PATIENCE_ROUND_TRIPS = 0.25, 4
_ROUNDS = 3
# Linux: IP_PMTUDISC_PROBE, never fragment and ignore the cached path MTU.
_MTU_DISCOVER = {
    socket.AF_INET: (socket.IPPROTO_IP, 10, 3),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3),
}
_HEADERS_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}


@dataclass(frozen=True, kw_only=True)
class DatagramResult:
    """How many small datagrams were sent, arrived, and were answered; the largest frames."""

    sent: int
    arrived: int
    returned: int
    frame_there_bytes: int | None = None
    frame_back_bytes: int | None = None


def token_of(nonce: str) -> bytes:
    """Return the token that proves that a sender knows the nonce."""
    return hashlib.sha256(f"datagram {nonce}".encode()).digest()[:16]


def open_socket(address: str) -> socket.socket:
    """Return a socket on any port of an address; its datagrams are not fragmented."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.bind((address, 0))
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if sizes_can_be_tried():
            sock.setsockopt(*_MTU_DISCOVER[family])
    except BaseException:
        sock.close()
        raise
    return sock


def sizes_can_be_tried() -> bool:
    """Return whether this system can send unfragmented datagrams."""
    return sys.platform == "linux"


class Answering(asyncio.DatagramProtocol):
    """The called side: counts and answers datagrams."""

    def __init__(self, nonce: str) -> None:
        self._token = token_of(nonce)
        self._counts: dict[bytes, int] = {}
        self._transport: asyncio.DatagramTransport | None = None

    def count(self, series: bytes) -> int:
        """Return how many of a series have arrived."""
        return self._counts.get(series, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for answers."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answer one datagram; ignore it without a valid token."""
        if len(data) < _HEAD.size or self._transport is None:
            return
        token, kind, series, number, size = _HEAD.unpack_from(data)
        if not hmac.compare_digest(token, self._token) or kind not in (_ECHO, _WANT):
            return
        if kind == _ECHO:
            self._counts[series] = self._counts.get(series, 0) + 1
            while len(self._counts) > _SERIES_KEPT:
                del self._counts[next(iter(self._counts))]
            size = _SMALL_BYTES
        answer = _datagram(self._token, _REPLY, series, number, size)
        # The kernel does not send what exceeds the MTU of this host.
        self._transport.sendto(answer, addr)


class _Calling(asyncio.DatagramProtocol):
    """The calling side: records which numbers have been answered."""

    def __init__(self, token: bytes, series: bytes) -> None:
        self.answered: set[int] = set()
        self.news = asyncio.Event()
        self.series = series
        self._known = token, _REPLY, series

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if len(data) < _HEAD.size:
            return
        *known, number, _ = _HEAD.unpack_from(data)
        if tuple(known) == self._known:
            self.answered.add(number)
            self.news.set()

    async def await_all(self, numbers: Iterable[int], within_s: float) -> None:
        """Wait for these answers; give up when none has arrived for ``within_s``."""
        wanted = set(numbers)
        while not wanted <= self.answered:
            self.news.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self.news.wait()
            except TimeoutError:
                return


async def probe_datagrams(
    address: str,
    port: int,
    nonce: str,
    *,
    local: str,
    count: int,
    round_trip_s: float,
    frames_bytes: tuple[int | None, int | None],
    ask_count: Callable[[bytes], Awaitable[int]],
) -> DatagramResult:
    """Send ``count`` small datagrams and some large ones; ``ask_count`` returns how many arrived.

    ``frames_bytes`` are the largest frames of the two ends, the local end first.
    """
    token, series = token_of(nonce), os.urandom(8)
    patience_s = max(_PATIENCE_S, _PATIENCE_ROUND_TRIPS * round_trip_s)
    sock = open_socket(local)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    transport, calling = await loop.create_datagram_endpoint(
        lambda: _Calling(token, series), sock=sock
    )
    try:
        for number in range(count):
            transport.sendto(_datagram(token, _ECHO, series, number, _SMALL_BYTES))
            if number % _IN_A_ROW == _IN_A_ROW - 1:
                await asyncio.sleep(_PAUSE_S)
        await calling.await_all(range(count), patience_s)
        is_whole = len(calling.answered) == count
        arrived = count if is_whole else await _settled(ask_count, series)
        returned = len(calling.answered)  # a busy host may have answered more meanwhile
        there = back = None
        if returned and sizes_can_be_tried():
            frames = _Frames(transport, calling, token, _HEADERS_BYTES[sock.family], patience_s)
            there, back = await asyncio.gather(
                frames.biggest(_ECHO, frames_bytes[0]), frames.biggest(_WANT, frames_bytes[1])
            )
    finally:
        transport.close()
    return DatagramResult(
        sent=count,
        arrived=arrived,
        returned=returned,
        frame_there_bytes=there,
        frame_back_bytes=back,
    )


async def _settled(ask_count: Callable[[bytes], Awaitable[int]], series: bytes) -> int:
    """Ask until the count is stable: a busy host may still be counting."""
    until = time.monotonic() + 1.0
    last, counted = None, await ask_count(series)
    while counted != last and time.monotonic() < until:
        await asyncio.sleep(0.1)
        last, counted = counted, await ask_count(series)
    return counted


class _Frames:
    """Tries frames of several sizes in parallel."""

    def __init__(
        self,
        transport: asyncio.DatagramTransport,
        calling: _Calling,
        token: bytes,
        headers_bytes: int,
        patience_s: float,
    ) -> None:
        self._transport, self._calling, self._token = transport, calling, token
        self._headers_bytes, self._patience_s = headers_bytes, patience_s
        self._next = 1 << 20  # well above the numbers of the small ones

    async def biggest(self, kind: bytes, own_bytes: int | None) -> int | None:
        """Return the largest frame that passes, up to ``own_bytes``; None if unknown."""
        if own_bytes is None:
            return None
        sizes, passed = [own_bytes], set[int]()
        for _ in range(_ROUNDS):
            passed |= await self._try(kind, sizes)
            if own_bytes in passed:
                break
            # Smaller frames at the same time: if they pass, the size is the cause.
            sizes = [own_bytes, *(size for size in USUAL_FRAMES if size < own_bytes)]
        return max(passed, default=None)

    async def _try(self, kind: bytes, sizes: Sequence[int]) -> set[int]:
        asked = {}
        for size in sizes:
            payload = size - self._headers_bytes
            # An echo has the tested size itself; a request for a large answer is small.
            length = payload if kind == _ECHO else _SMALL_BYTES
            number, self._next = self._next, self._next + 1
            asked[number] = size
            data = _datagram(self._token, kind, self._calling.series, number, payload, length)
            self._transport.sendto(data)
        await self._calling.await_all(asked, self._patience_s)
        return {size for number, size in asked.items() if number in self._calling.answered}


def _datagram(
    token: bytes, kind: bytes, series: bytes, number: int, size: int, length: int | None = None
) -> bytes:
    wanted = min(size if length is None else length, _MOST_BYTES)
    return _HEAD.pack(token, kind, series, number, size).ljust(wanted, b"\0")


PING, TAKE, GIVE, COUNT = b"p", b"t", b"g", b"c"
HEADER = struct.Struct("!cQ")
PING_BYTES = 64
BLOCK_BYTES = 256 * 1024
# Upper limit of a transfer, whatever a caller requests.
MOST_BYTES = 64 * 1024 * 1024

_REPORT = struct.Struct("!ddQ")
_SCHEDULING = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The result of a bulk transfer at one end."""

    seconds: float = 0.0
    waited_s: float = 0.0
    wrong_bytes: int = 0

    def packed(self) -> bytes:
        """Return it as bytes for the other end."""
        return _REPORT.pack(self.seconds, self.waited_s, self.wrong_bytes)


REPORT_BYTES = _REPORT.size


def unpacked(data: bytes) -> Transfer:
    """Parse the other end's report of a transfer."""
    seconds, waited_s, wrong_bytes = _REPORT.unpack(data)
    return Transfer(seconds=seconds, waited_s=waited_s, wrong_bytes=wrong_bytes)


def block_of(nonce: str) -> bytes:
    """Return the block of data that both ends know."""
    return random.Random(nonce).randbytes(BLOCK_BYTES)


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Return ``count`` bytes; raise ``ConnectionError`` if the peer closes the connection."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        data += piece
    return data


async def send_blocks(sock: socket.socket, count: int, block: bytes) -> Transfer:
    """Send ``count`` bytes of data."""
    loop = asyncio.get_running_loop()
    began, waited = time.monotonic(), _waited_s()
    left = count
    while left:
        piece = block[: min(left, BLOCK_BYTES)]
        await loop.sock_sendall(sock, piece)
        left -= len(piece)
    return Transfer(seconds=time.monotonic() - began, waited_s=_waited_s() - waited)


async def receive_blocks(sock: socket.socket, count: int, block: bytes) -> Transfer:
    """Receive ``count`` bytes of data, and compare each with what was sent."""
    loop = asyncio.get_running_loop()
    began, waited = time.monotonic(), _waited_s()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    received = wrong = 0
    while received < count:
        offset = received % BLOCK_BYTES
        room = min(BLOCK_BYTES - offset, count - received)
        size = await loop.sock_recv_into(sock, view[:room])
        if not size:
            raise ConnectionError("the peer closed the connection")
        if buffer[:size] != block[offset : offset + size]:
            wrong += sum(
                one != other
                for one, other in zip(buffer[:size], block[offset : offset + size], strict=True)
            )
        received += size
    return Transfer(
        seconds=time.monotonic() - began, waited_s=_waited_s() - waited, wrong_bytes=wrong
    )


def _waited_s() -> float:
    """Return how long this thread has waited for a CPU while runnable; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_SCHEDULING.read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0
