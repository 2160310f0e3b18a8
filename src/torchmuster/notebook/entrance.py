"""Where ranks come in: listens until all are there, and lets in nobody without the key."""

import contextlib
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from torchmuster.notebook.connection import Connection
from torchmuster.notebook.messages import NotTheOther, admit

# For a stranger as for a rank: the proof is a few bytes, and a rank sends it at once.
_PROVE_WITHIN_S = 5.0
_MOST_AT_ONCE = 64


class Entrance:
    """Listens at addresses of this machine; ``on_rank`` is told of each rank, in a thread.

    Without a TLS context only loopback makes sense: what is said could be read on the way.
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
        self.refused: list[str] = []  # whence, and why
        self._listening = [_listen(address) for address in addresses]
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
        """Listen no more; connections that were let in stay."""
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
                        with contextlib.suppress(OSError):  # it has gone again
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
            rank = admit(end, self._secret)
            with self._turn:
                if rank in self._here:
                    raise NotTheOther(f"rank {rank} is here already")
                self._here.add(rank)
        except (OSError, NotTheOther) as error:
            self.refused.append(f"{source}: {error}")
            end.close()
        else:
            self._on_rank(rank, Connection(end))
        finally:
            self._room.release()


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    listening.setblocking(False)
    return listening
