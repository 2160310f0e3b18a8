"""Where the ranks of a notebook connect: at a socket in a folder of this user, with the key of this start."""

import contextlib
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

import msgspec

from torchmuster.notebook.messages import Hello

_LONGEST_HELLO = 1000
# What a client causes that is not a rank, or has no key.
_NO_RANK = (OSError, EOFError, AssertionError, AuthenticationError, msgspec.DecodeError)


class RankListener:
    """Listens until it is closed; ``on_rank`` is called for each rank, in a thread."""

    def __init__(self, secret: bytes, on_rank: Callable[[Hello, Connection], None]) -> None:
        self._secret, self._on_rank = secret, on_rank
        # Other users cannot enter it. In /tmp, because the path of a socket has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="muster-", dir="/tmp")
        self.address = f"{self._folder.name}/ranks"
        self._listener = Listener(self.address, family="AF_UNIX", authkey=secret)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="notebook-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        self._closed = True
        with contextlib.suppress(*_NO_RANK):  # it is closed already
            Client(self.address, authkey=self._secret).close()  # ends the last accept
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(*_NO_RANK):
                connection: Connection = self._listener.accept()
                content = connection.recv_bytes(_LONGEST_HELLO)
                self._on_rank(msgspec.msgpack.decode(content, type=Hello), connection)
