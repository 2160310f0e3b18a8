"""Where the ranks of a notebook connect: on loopback, each once, with the key of this start."""

import contextlib
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from torchmuster.notebook.messages import LOOPBACK, Hello

_LONGEST_HELLO = 1000


class RankListener:
    """Listens until it is closed; ``on_rank`` is called for each rank, in a thread."""

    def __init__(self, secret: bytes, on_rank: Callable[[Hello, Connection], None]) -> None:
        self._secret = secret
        self._on_rank = on_rank
        self._listening = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listening.getsockname()[1]
        self._connected: set[int] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="notebook-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes up accept
        self._thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # closed
                return
            connection = Connection(accepted.detach())
            # A thread for each: a client that stays silent delays no rank.
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            hello = msgspec.msgpack.decode(connection.recv_bytes(_LONGEST_HELLO), type=Hello)
            with self._lock:
                if hello.rank in self._connected:
                    raise AuthenticationError(f"rank {hello.rank} is already connected")
                self._connected.add(hello.rank)
        except (EOFError, OSError, AssertionError, AuthenticationError, msgspec.DecodeError):
            connection.close()
        else:
            self._on_rank(hello, connection)
