"""An authenticated connection between the notebook and one rank."""

import contextlib
import queue
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from torchmuster.notebook.messages import NotTheOther, admit_rank

_HEADER_BYTES = 4
LONGEST_MESSAGE = 2**31
_PIECE_BYTES = 2**20
# Maximum queued messages before the sender blocks.
_MOST_WAITING = 1000
_LOOK_AGAIN_S = 0.01
_DELIVER_WITHIN_S = 2.0
T = TypeVar("T")
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """Messages over a socket, plain or TLS; one thread may receive.

    A separate thread sends, so that Ctrl-C during a ``print`` cannot split a message.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        # OpenSSL does not support two threads in one connection; no thread blocks while holding it.
        self._turn = threading.Lock()
        # SimpleQueue.put is reentrant, so a signal cannot break it.
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_on, name="notebook-sender", daemon=True)
        self._sender.start()

    def send(self, message: object) -> None:
        """Send a message; does nothing if the other side has disconnected."""
        data = msgspec.msgpack.encode(message)
        while self._waiting.qsize() >= _MOST_WAITING and self._sender.is_alive():
            time.sleep(_LOOK_AGAIN_S)
        self._waiting.put(data)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """Wait for the next message; None after the other side has disconnected."""
        try:
            size = int.from_bytes(self._read(_HEADER_BYTES), "big")
            if size > LONGEST_MESSAGE:
                return None
            return decoder.decode(self._read(size))
        except (OSError, EOFError, ValueError, RecursionError, msgspec.DecodeError):
            return None

    def close(self) -> None:
        """Flush the queue, then close the connection."""
        self._waiting.put(None)
        self._sender.join(_DELIVER_WITHIN_S)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes up the receiver
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
        # Not select(), which supports only the first 1024 file descriptors.
        poll = select.poll()
        poll.register(self._end, event)
        poll.poll()

    def _send_on(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # disconnected; the receiver notices
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


# For unauthenticated clients too: the proof is a few bytes, and a rank sends it immediately.
_PROVE_WITHIN_S = 5.0
_MOST_AT_ONCE = 64


class RankListener:
    """Listens on local addresses; ``on_rank`` is called for each rank, in a thread.

    Without a TLS context, use loopback only: the traffic is not encrypted.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes,
        on_rank: Callable[[int, Connection], None],
        *,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._secret = secret
        self._on_rank = on_rank
        self._context = context
        self.refused: list[str] = []  # source address and reason
        self._listening = [_listen_connection(address) for address in addresses]
        self._here: set[int] = set()
        self._turn = threading.Lock()
        self._room = threading.Semaphore(_MOST_AT_ONCE)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._take, name="notebook-entrance", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Address and port of each socket that listens."""
        return tuple(one.getsockname()[:2] for one in self._listening)

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        self._wake.close()
        self._thread.join()
        self._woken.close()

    def _take(self) -> None:
        with selectors.DefaultSelector() as ready, contextlib.ExitStack() as sockets:
            for one in (*self._listening, self._woken):
                ready.register(one, selectors.EVENT_READ)
            for one in self._listening:
                sockets.enter_context(one)
            while True:
                some = [key.fileobj for key, _ in ready.select()]
                if self._woken in some:
                    return
                for one in self._listening:
                    if one in some:
                        with contextlib.suppress(OSError):  # already disconnected
                            self._hear(*one.accept())

    def _hear(self, end: socket.socket, source: tuple[str, int]) -> None:
        if not self._room.acquire(blocking=False):
            end.close()
            return
        threading.Thread(
            target=self._listen_to, args=(end, source[0]), name="notebook-newcomer", daemon=True
        ).start()

    def _listen_to(self, end: socket.socket, source: str) -> None:
        try:
            end.settimeout(_PROVE_WITHIN_S)
            if self._context is not None:
                end = self._context.wrap_socket(end, server_side=True)
            rank = admit_rank(end, self._secret)
            with self._turn:
                if rank in self._here:
                    raise NotTheOther(f"rank {rank} is already connected")
                self._here.add(rank)
        except (OSError, NotTheOther) as error:
            self.refused.append(f"{source}: {error}")
            end.close()
        else:
            self._on_rank(rank, Connection(end))
        finally:
            self._room.release()


def _listen_connection(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    listening.setblocking(False)
    return listening
