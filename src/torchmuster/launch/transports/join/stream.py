"""A TLS connection that carries messages.

A message is a four-byte big-endian length and that many bytes of JSON. The length comes first so that
a message that is too long is refused before it is read.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Generic

from torchmuster.launch import protocol

HEADER_BYTES = 4
# Bytes that are read ahead.
READ_AHEAD_BYTES = 16 * 1024
# With more bytes waiting to be sent, a sender waits.
_UNSENT_BYTES = 64 * 1024
_CLOSE_WITHIN_S = 2.0
# A peer that accepts nothing for this long is declared lost.
SEND_S = 10.0
_ALIVE = protocol.encode(protocol.Alive())


class Stream:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.why_closed = ""  # the first cause of the end
        self._reader = reader
        self._size: int | None = None  # of the message whose header has been read
        self._aborted = False

    def peer_certificate(self) -> bytes | None:
        """Return the other side's certificate."""
        tls: ssl.SSLObject = self.writer.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True)

    def peer_address(self) -> str:
        """Return the other side's IP address."""
        return str(self.writer.get_extra_info("peername")[0])

    async def receive(
        self, limit_bytes: int, decode: Callable[[bytes], protocol.Read]
    ) -> protocol.Read | None:
        """Return the next message, or None at the end. A call after a cancelled one loses nothing.

        A message that is too long, or that ``decode`` rejects, closes the connection and raises
        ``UnreadableMessage``.
        """
        if self._aborted:  # the rest of the buffer is not trusted
            return None
        try:
            if self._size is None:
                header = await self._reader.readexactly(HEADER_BYTES)
                self._size = int.from_bytes(header, "big")
            if not 0 < self._size <= limit_bytes:
                raise protocol.UnreadableMessage(
                    f"a message of {self._size} bytes; the limit is {limit_bytes}"
                )
            data = await self._reader.readexactly(self._size)
            self._size = None
            return decode(data)
        except asyncio.IncompleteReadError:
            self._end("the other side closed the connection")
        except OSError as error:
            self._end(f"connection lost: {error}")
        except protocol.UnreadableMessage:
            self.abort("received an invalid message")
            raise
        return None

    def send_at_once(self, data: bytes) -> bool:
        """Send a message if that needs no waiting; return whether it was sent, or never will be."""
        if self.writer.is_closing():
            return True
        if self.writer.transport.get_write_buffer_size() > _UNSENT_BYTES:
            return False
        self.writer.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
        return True

    async def send(self, data: bytes) -> None:
        """Send a message; nothing happens if the connection has ended.

        Returns when the peer has accepted most of the earlier data. If it accepts nothing for too long,
        the connection is closed, so that one peer does not block a caller that sends to many.
        """
        if len(data) > protocol.MESSAGE_LIMIT:
            raise protocol.UnreadableMessage(f"a message of {len(data)} bytes is too long to send")
        if self.send_at_once(data):
            return
        self.writer.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
        try:
            async with asyncio.timeout(SEND_S):
                await self.writer.drain()
        except TimeoutError:
            self.abort(f"the other side accepted no data for {SEND_S:g} s")
        except OSError as error:
            self._end(f"connection lost: {error}")

    def abort(self, why: str) -> None:
        """Close the connection at once, without waiting for the peer."""
        self._end(why)
        self._aborted = True
        self.writer.transport.abort()

    async def close(self) -> None:
        """Send pending data and close the connection, within a short timeout."""
        self.writer.close()
        # Not wait_closed itself: after a call of it that was cancelled, every later one is.
        flushed = asyncio.create_task(self._wait_closed())
        await asyncio.wait({flushed}, timeout=_CLOSE_WITHIN_S)
        self.abort("closed on this side")

    async def _wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def _end(self, why: str) -> None:
        self.why_closed = self.why_closed or why


class MessageChannel(Generic[protocol.Read]):
    """Either side's channel (channel.py) over a stream whose other side has proved who it is; ``host`` is its address."""

    def __init__(
        self, stream: Stream, decode: Callable[[bytes], protocol.Read], *, host: str = ""
    ) -> None:
        self._stream = stream
        self._decode = decode
        self.host = host

    async def send(self, message: protocol.Message) -> None:
        """Send a message; on a closed channel this does nothing."""
        await self._stream.send(protocol.encode(message))

    def say_alive(self) -> None:
        """Send a heartbeat, unless earlier messages are still being sent: it needs no task."""
        self._stream.send_at_once(_ALIVE)

    async def receive(self) -> protocol.Read | None:
        """Return the next message, or None when the other side is gone. Raises ``UnreadableMessage``."""
        return await self._stream.receive(protocol.MESSAGE_LIMIT, self._decode)

    def why_closed(self) -> str:
        """Return the known cause after ``receive`` returned None."""
        return self._stream.why_closed

    async def close(self) -> None:
        """Close the connection; the launcher declares a machine lost that does."""
        await self._stream.close()


async def accept_stream(
    accepted: socket.socket, context: ssl.SSLContext, timeout_s: float
) -> Stream:
    """Do the TLS handshake of a server on a connected socket, which the stream then owns.

    ``asyncio.start_server`` would accept any number of connections before their handshakes are done.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_AHEAD_BYTES)
    stream_protocol = asyncio.StreamReaderProtocol(reader)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: stream_protocol, accepted, ssl=context, ssl_handshake_timeout=timeout_s
        )
    except BaseException:
        accepted.close()
        raise
    writer = asyncio.StreamWriter(transport, stream_protocol, reader, loop)
    return Stream(reader, writer)
