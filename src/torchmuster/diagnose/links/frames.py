"""What two machines say on a connection over which a link is measured.

After the nonce the caller asks: a header each, which says what is wanted and how many bytes of it.
Bulk data is always the same block, over and over, which both sides know from the nonce; so whoever
receives it sees every byte that was changed on the way.
"""

import asyncio
import contextlib
import random
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

PING, TAKE, GIVE, COUNT = b"p", b"t", b"g", b"c"
HEADER = struct.Struct("!cQ")
PING_BYTES = 64
BLOCK_BYTES = 256 * 1024
# No transfer is bigger, whatever a caller asks for.
MOST_BYTES = 64 * 1024 * 1024

_REPORT = struct.Struct("!ddQ")
_SCHEDULING = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How the receiving, or the sending, of much data went at one end."""

    seconds: float = 0.0
    waited_s: float = 0.0
    wrong_bytes: int = 0

    def packed(self) -> bytes:
        """Return it as bytes, to be sent to the other end."""
        return _REPORT.pack(self.seconds, self.waited_s, self.wrong_bytes)


REPORT_BYTES = _REPORT.size


def unpacked(data: bytes) -> Transfer:
    """Read what the other end says of a transfer."""
    seconds, waited_s, wrong_bytes = _REPORT.unpack(data)
    return Transfer(seconds=seconds, waited_s=waited_s, wrong_bytes=wrong_bytes)


def block_of(nonce: str) -> bytes:
    """Return the block of data that both ends know."""
    return random.Random(nonce).randbytes(BLOCK_BYTES)


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Return so many bytes; raises ``ConnectionError`` if the other side ends before."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionError("the other side ended the connection")
        data += piece
    return data


async def send_blocks(sock: socket.socket, count: int, block: bytes) -> Transfer:
    """Send so many bytes of data."""
    loop = asyncio.get_running_loop()
    began, waited = time.monotonic(), _waited_s()
    left = count
    while left:
        piece = block[: min(left, BLOCK_BYTES)]
        await loop.sock_sendall(sock, piece)
        left -= len(piece)
    return Transfer(seconds=time.monotonic() - began, waited_s=_waited_s() - waited)


async def receive_blocks(sock: socket.socket, count: int, block: bytes) -> Transfer:
    """Receive so many bytes of data, and compare each with what was sent."""
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
            raise ConnectionError("the other side ended the connection")
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
    """Return how long this thread has been ready to run while others were running; 0 if not told."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_SCHEDULING.read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0
