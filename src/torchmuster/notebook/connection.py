"""A connection between the notebook and one rank, after both have proved who they are."""

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from typing import TypeVar

import msgspec

_HEADER_BYTES = 4
LONGEST_MESSAGE = 2**31
_PIECE_BYTES = 2**20
# So many messages wait to be sent before whoever sends another one is held up.
_MOST_WAITING = 1000
_LOOK_AGAIN_S = 0.01
_DELIVER_WITHIN_S = 2.0
T = TypeVar("T")
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """Messages over a socket, plain or TLS; one thread may receive.

    A thread of its own sends, so that Ctrl-C in the middle of a ``print`` cannot cut a message in two.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        # OpenSSL does not bear two threads in one connection; nobody waits while holding it.
        self._turn = threading.Lock()
        # A put into this kind of queue is one step, also when a signal comes.
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_on, name="notebook-sender", daemon=True)
        self._sender.start()

    def send(self, message: object) -> None:
        """Send a message; nothing happens if the other side has gone."""
        data = msgspec.msgpack.encode(message)
        while self._waiting.qsize() >= _MOST_WAITING and self._sender.is_alive():
            time.sleep(_LOOK_AGAIN_S)
        self._waiting.put(data)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """Wait for the next message; None when the other side has gone."""
        try:
            size = int.from_bytes(self._read(_HEADER_BYTES), "big")
            if size > LONGEST_MESSAGE:
                return None
            return decoder.decode(self._read(size))
        except (OSError, EOFError, ValueError, RecursionError, msgspec.DecodeError):
            return None

    def close(self) -> None:
        """Deliver what was sent, then end the connection."""
        self._waiting.put(None)
        self._sender.join(_DELIVER_WITHIN_S)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes whoever receives
        self._end.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        room = memoryview(data)
        while room:
            try:
                with self._turn:
                    count = self._end.recv_into(room[:_PIECE_BYTES])
            except _NOT_YET:
                self._wait_for(select.POLLIN)
                continue
            if not count:
                raise EOFError
            room = room[count:]
        return data

    def _wait_for(self, event: int) -> None:
        # Not select(), which knows only the first 1024 of a process's open files.
        poll = select.poll()
        poll.register(self._end, event)
        poll.poll()

    def _send_on(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has gone, which receiving tells
            while (data := self._waiting.get()) is not None:
                self._write(len(data).to_bytes(_HEADER_BYTES, "big"))
                self._write(data)

    def _write(self, data: bytes) -> None:
        room = memoryview(data)
        while room:
            try:
                with self._turn:
                    count = self._end.send(room[:_PIECE_BYTES])
            except _NOT_YET:
                self._wait_for(select.POLLOUT)
                continue
            room = room[count:]
