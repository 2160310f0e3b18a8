"""Knocking at the port of ssh: does it open, does the server speak, do big packets arrive there.

TCP itself tells whether a packet arrived, by acknowledging it. So nothing is needed on the other side, no
login and no ping; and what is tried is what ssh sends, in the sizes in which TCP would send it.
"""

import asyncio
import contextlib
import socket
import struct
import sys
import time
from dataclasses import dataclass

from torchmuster.diagnose.connection import problem_of

_LOOK_EVERY_S = 0.05
_CONNECTED_WITHIN_S = 2.0
# Lost packets are sent again after 0.2, 0.6 and 1.4 s.
_HEARD_WITHIN_S = 1.8
_GREETING = b"SSH-2.0-torchmuster\r\n"
_MSG_IGNORE = 2
_HEADERS_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}


@dataclass(frozen=True, kw_only=True)
class Knock:
    """How a port answered: ``problem`` is "" if it opened.

    ``greeted``: the server said something, or hung up. ``sent_bytes`` went there in one packet and
    ``arrived``; both are None where the system does not tell.
    """

    problem: str
    seconds: float
    greeted: bool = False
    sent_bytes: int | None = None
    arrived: bool | None = None


async def knock(
    address: str,
    port: int,
    *,
    frame_bytes: int | None = None,
    within_s: float = _CONNECTED_WITHIN_S,
) -> Knock:
    """Connect, and send one packet that is as big as may be, or fits into a frame of this size."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    began = time.monotonic()
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        if frame_bytes is not None:
            most = frame_bytes - _HEADERS_BYTES[family]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, most)
        try:
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except OSError as error:
            seconds = time.monotonic() - began
            return Knock(problem=problem_of(error, seconds), seconds=seconds)
        return await _talk(sock, time.monotonic() - began)


async def _talk(sock: socket.socket, seconds: float) -> Knock:
    heard = asyncio.Event()
    listening = asyncio.create_task(_listen(sock, heard))
    sent = _segment_bytes(sock)
    arrived = None if sent is None else False
    try:
        if sent is not None:
            with contextlib.suppress(OSError):  # hung up already, which is an answer too
                await asyncio.get_running_loop().sock_sendall(sock, _message(sent))
        until = time.monotonic() + _HEARD_WITHIN_S
        is_late = False
        while not is_late and (arrived is False or not heard.is_set()):
            is_late = time.monotonic() > until  # who was held up looks once more
            await asyncio.sleep(_LOOK_EVERY_S)
            if arrived is False:
                # Whoever hangs up has no more to acknowledge.
                arrived = listening.done() or _unacknowledged_bytes(sock) == 0
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return Knock(
        problem="", seconds=seconds, greeted=heard.is_set(), sent_bytes=sent, arrived=arrived
    )


async def _listen(sock: socket.socket, heard: asyncio.Event) -> None:
    """Take in what the other side says, until it hangs up."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while await loop.sock_recv(sock, 1 << 16):
            heard.set()
    heard.set()


def _message(size: int) -> bytes:
    """Return a greeting and a message that a server ignores: as many bytes as one packet has."""
    room = size - len(_GREETING)
    # The length, that of the padding, the kind, the length of the data, the data, the padding; all of
    # it together is a multiple of 8.
    whole = room // 8 * 8
    padding = 8
    data = whole - 4 - 1 - 1 - 4 - padding
    head = struct.pack("!IBBI", whole - 4, padding, _MSG_IGNORE, data)
    message = head + bytes(data + padding)
    return (_GREETING + message).ljust(size, b"\0")


def _segment_bytes(sock: socket.socket) -> int | None:
    """Return how much fits into one packet of a connection; None where it cannot be watched."""
    if sys.platform != "linux":
        return None
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)


def _unacknowledged_bytes(sock: socket.socket) -> int:
    import fcntl  # not there on Windows, where this is never called
    import termios

    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, struct.pack("@i", 0))
    return int(struct.unpack("@i", answer)[0])
