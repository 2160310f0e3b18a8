"""Data over a TCP connection between two hosts: small messages and bulk transfers of known bytes."""

import asyncio
import random
import socket
import struct
import time
from dataclasses import dataclass

PING, TAKE, GIVE = b"p", b"t", b"g"
HEADER = struct.Struct("!cQ")
PING_BYTES = 64
BLOCK_BYTES = 256 * 1024
# Upper limit of a transfer, whatever a caller requests.
MOST_BYTES = 64 * 1024 * 1024
REPORT = struct.Struct("!dQ")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The result of a bulk transfer at its receiver."""

    seconds: float
    wrong_bytes: int


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
    """Send ``count`` bytes of data; return the receiver's report."""
    loop = asyncio.get_running_loop()
    left = count
    while left:
        piece = block[: min(left, BLOCK_BYTES)]
        await loop.sock_sendall(sock, piece)
        left -= len(piece)
    seconds, wrong = REPORT.unpack(await read_exactly(sock, REPORT.size))
    return Transfer(seconds=seconds, wrong_bytes=wrong)


async def receive_blocks(sock: socket.socket, count: int, block: bytes) -> Transfer:
    """Receive ``count`` bytes of data, compare each with what was sent, and report the result."""
    loop = asyncio.get_running_loop()
    began = time.monotonic()
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
    seconds = time.monotonic() - began
    await loop.sock_sendall(sock, REPORT.pack(seconds, wrong))
    return Transfer(seconds=seconds, wrong_bytes=wrong)
