"""Data over a TCP connection between two hosts: small messages and bulk transfers of known bytes."""

import asyncio
import contextlib
import random
import socket
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

PING, TAKE, GIVE = b"p", b"t", b"g"
HEADER = struct.Struct("!cQ")
PING_BYTES = 64
BLOCK_BYTES = 256 * 1024
# Upper limit of a transfer, whatever a caller requests.
MOST_BYTES = 64 * 1024 * 1024
REPORT = struct.Struct("!ddQ")
_SCHEDULING = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The result of a bulk transfer; ``waited_s`` is how long an end waited for a CPU."""

    seconds: float
    waited_s: float
    wrong_bytes: int = 0


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
    """Send ``count`` bytes of data; return the receiver's result."""
    loop = asyncio.get_running_loop()
    waited_s = _waited_s()
    left = count
    while left:
        piece = block[: min(left, BLOCK_BYTES)]
        await loop.sock_sendall(sock, piece)
        left -= len(piece)
    mine = Transfer(seconds=0.0, waited_s=_waited_s() - waited_s)
    theirs = await _exchange(sock, mine)
    return replace(theirs, waited_s=max(mine.waited_s, theirs.waited_s))


async def receive_blocks(sock: socket.socket, count: int, block: bytes) -> Transfer:
    """Receive ``count`` bytes of data, and compare each with what was sent."""
    loop = asyncio.get_running_loop()
    began, waited_s = time.monotonic(), _waited_s()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    received = wrong = 0
    while received < count:
        offset = received % BLOCK_BYTES
        room = min(BLOCK_BYTES - offset, count - received)
        size = await loop.sock_recv_into(sock, view[:room])
        if not size:
            raise ConnectionError("the peer closed the connection")
        expected = block[offset : offset + size]
        if buffer[:size] != expected:
            for byte, expected_byte in zip(buffer[:size], expected, strict=True):
                wrong += byte != expected_byte
        received += size
    mine = Transfer(
        seconds=time.monotonic() - began, waited_s=_waited_s() - waited_s, wrong_bytes=wrong
    )
    theirs = await _exchange(sock, mine)
    return replace(mine, waited_s=max(mine.waited_s, theirs.waited_s))


async def _exchange(sock: socket.socket, mine: Transfer) -> Transfer:
    """Send this end's result to the other end; return that of the other end."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, REPORT.pack(mine.seconds, mine.waited_s, mine.wrong_bytes))
    seconds, waited_s, wrong = REPORT.unpack(await read_exactly(sock, REPORT.size))
    return Transfer(seconds=seconds, waited_s=waited_s, wrong_bytes=wrong)


def _waited_s() -> float:
    """Return how long this thread has waited for a CPU while runnable; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_SCHEDULING.read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0
