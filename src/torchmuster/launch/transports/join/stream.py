"""A TLS connection that carries messages.

A message is a four-byte big-endian length and that many bytes of JSON. The length comes first so that
a message that is too long is refused before it is read.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from torchmuster.launch import protocol

HEADER_BYTES = 4
# Bytes that are read ahead.
_READ_AHEAD_BYTES = 16 * 1024
# With more bytes waiting to be sent, a sender waits.
_UNSENT_BYTES = 64 * 1024
_SHUTDOWN_S = 2
# A peer that accepts nothing for this long is declared lost.
SEND_S = 10.0


class Stream:
    """One connection. ``on_lost`` is called once, when it has ended for any reason."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.lost = False
        self._over = asyncio.Event()
        self.why_closed = ""
        self._aborted = False
        self._received = bytearray()  # the beginning of the next message
        self._reader = reader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def writer(self) -> asyncio.StreamWriter:
        """The writing end, after the handshake."""
        if self._writer is None:
            raise ConnectionResetError("closed during the handshake")
        return self._writer

    def opened(self, writer: asyncio.StreamWriter) -> None:
        """Record that the handshake is done."""
        self._writer = writer

    def ended(self, error: BaseException | None) -> None:
        """Record that the connection has ended."""
        self.lost = True
        self._over.set()
        if error is not None:
            self._because(f"connection lost: {error}")
        if self.on_lost is not None:
            self.on_lost()

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
        """Return the next message, or None at the end.

        A message that is too long, or that ``decode`` rejects, closes the connection and raises
        ``UnreadableMessage``.
        """
        if self._aborted:  # the rest of the buffer is not trusted
            return None
        try:
            while (data := self._next_message(limit_bytes)) is None:
                # A call after a cancellation continues here; nothing is lost.
                new = await self._reader.read(_READ_AHEAD_BYTES)
                if not new:
                    self._because("the other side closed the connection")
                    return None
                self._received += new
            return decode(data)
        except OSError as error:
            self._because(f"connection lost: {error}")
            return None
        except protocol.UnreadableMessage:
            self.abort("received an invalid message")
            raise

    def _next_message(self, limit_bytes: int) -> bytes | None:
        """Return the next message if it has been received; raise ``UnreadableMessage`` if it is too long."""
        if len(self._received) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._received[:HEADER_BYTES], "big")
        if not 0 < size <= limit_bytes:
            raise protocol.UnreadableMessage(
                f"a message of {size} bytes; the limit is {limit_bytes}"
            )
        end = HEADER_BYTES + size
        if len(self._received) < end:
            return None
        data = bytes(self._received[HEADER_BYTES:end])
        del self._received[:end]
        return data

    def send_at_once(self, data: bytes) -> bool:
        """Send a message if that needs no waiting; return whether it was sent, or never will be."""
        if self.lost or self.writer.is_closing():
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
            self._because(f"connection lost: {error}")

    def abort(self, why: str) -> None:
        """Close the connection at once, without waiting for the peer."""
        self._because(why)
        self._aborted = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Send pending data and close the connection, within a short timeout."""
        self._because("closed on this side")
        # A TimeoutError is an OSError.
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_SHUTDOWN_S):
                self.writer.close()
                # Not wait_closed: if one call of it is cancelled, every later one is.
                await self._over.wait()
        self.abort("")

    def _because(self, why: str) -> None:
        # Keep the first cause.
        self.why_closed = self.why_closed or why


class StreamProtocol(asyncio.StreamReaderProtocol):
    """asyncio's protocol of a StreamReader, which also reports the end of the connection."""

    def __init__(self, on_open: Callable[[Stream], None]) -> None:
        reader = asyncio.StreamReader(limit=_READ_AHEAD_BYTES)
        super().__init__(reader, self._opened)
        self._stream = Stream(reader)
        self._on_open = on_open

    def _opened(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stream.opened(writer)
        self._on_open(self._stream)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the stream."""
        super().connection_lost(exc)
        self._stream.ended(exc)


async def open_stream(
    connected: socket.socket, context: ssl.SSLContext, *, handshake_s: float
) -> Stream:
    """Do the TLS handshake of a client on a connected socket, which the stream then owns.

    Raises OSError and closes the socket if the handshake fails.
    """
    opened: list[Stream] = []
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: StreamProtocol(opened.append),
            sock=connected,
            ssl=context,
            server_hostname="",
            ssl_handshake_timeout=handshake_s,
        )
    except BaseException:
        connected.close()
        raise
    if not opened:
        raise ConnectionResetError("closed during the handshake")
    return opened[0]
