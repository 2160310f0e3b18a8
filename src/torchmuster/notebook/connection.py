"""An authenticated connection over loopback between the notebook and one rank."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from torchmuster.notebook.messages import NotTheOther, admit_rank

LOOPBACK = "127.0.0.1"
LONGEST_MESSAGE = 2**31
_HEADER_BYTES = 4
# Maximum queued messages before the sender blocks.
_MOST_WAITING = 1000
_LOOK_AGAIN_S = 0.01
_DELIVER_WITHIN_S = 2.0
# For unauthenticated clients too: the proof is a few bytes, and a rank sends it immediately.
_PROVE_WITHIN_S = 5.0
_MOST_AT_ONCE = 64
T = TypeVar("T")


class Connection:
    """Messages over a socket; one thread may receive.

    A separate thread sends, so that Ctrl-C during a ``print`` cannot split a message.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        self._end = end
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
            count = self._end.recv_into(room)
            if not count:
                raise EOFError
            room = room[count:]
        return data

    def _send_on(self) -> None:
        with contextlib.suppress(OSError):  # disconnected; the receiver notices
            while True:
                data = self._waiting.get()
                if data is None:
                    break
                self._end.sendall(len(data).to_bytes(_HEADER_BYTES, "big"))
                self._end.sendall(data)


class RankListener:
    """Listens on loopback; ``on_rank`` is called for each rank, in a thread."""

    def __init__(self, secret: bytes, on_rank: Callable[[int, Connection], None]) -> None:
        self._secret = secret
        self._on_rank = on_rank
        self.refused: list[str] = []  # reasons
        self._listening = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listening.getsockname()[1]
        self._here: set[int] = set()
        self._turn = threading.Lock()
        self._room = threading.Semaphore(_MOST_AT_ONCE)
        self._thread = threading.Thread(target=self._take, name="notebook-entrance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes up accept
        self._thread.join()
        self._listening.close()

    def _take(self) -> None:
        while True:
            try:
                end, _ = self._listening.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # closed
                return
            if self._room.acquire(blocking=False):
                threading.Thread(
                    target=self._admit, args=(end,), name="notebook-newcomer", daemon=True
                ).start()
            else:
                end.close()

    def _admit(self, end: socket.socket) -> None:
        try:
            end.settimeout(_PROVE_WITHIN_S)
            rank = admit_rank(end, self._secret)
            with self._turn:
                if rank in self._here:
                    raise NotTheOther(f"rank {rank} is already connected")
                self._here.add(rank)
        except (OSError, NotTheOther) as error:
            self.refused.append(str(error))
            end.close()
        else:
            self._on_rank(rank, Connection(end))
        finally:
            self._room.release()
