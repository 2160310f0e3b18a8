"""Messages between the notebook and its ranks, over connections of ``multiprocessing``.

A message is MessagePack, decoded into these types only: nothing is unpickled. A rank and the notebook first prove to each
other that they have the key, which is never sent (``multiprocessing.connection.deliver_challenge``).
"""

import contextlib
import os
import queue
import threading
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

# Redacted by name in all output; removed from a rank's environment at startup.
SECRET_VARIABLE = "TORCHMUSTER_NOTEBOOK_SECRET"  # noqa: S105  # a variable's name
SECRET_BYTES = 32
LONGEST_MESSAGE = 2**31 - 1
_DELIVER_WITHIN_S = 2.0
T = TypeVar("T")


class Message(msgspec.Struct, kw_only=True, tag=True):
    """A message; its class is sent with it."""


class Hello(Message):
    """The first message of a rank; ``run`` is the name of the run's folder."""

    rank: int
    world_size: int
    pid: int
    run: str


class Run(Message):
    """Run a cell; ``name`` is its file name in tracebacks."""

    request: int
    name: str
    code: str


class Wrote(Message):
    """Text that a rank's Python code printed."""

    text: str


class Done(Message):
    """A cell has finished: its last expression as text, or the traceback."""

    request: int
    value: str = ""
    error: str = ""
    interrupted: bool = False


FromRank = Wrote | Done


def new_secret() -> bytes:
    """Return a key for one start of ranks."""
    return os.urandom(SECRET_BYTES)


def send(connection: Connection, message: Message) -> None:
    """Send a message; does nothing if the other side has disconnected, which the receiver notices."""
    with contextlib.suppress(OSError):
        connection.send_bytes(msgspec.msgpack.encode(message))


def receive(connection: Connection, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Wait for the next message; None after the other side has disconnected."""
    try:
        return decoder.decode(connection.recv_bytes(LONGEST_MESSAGE))
    except (OSError, EOFError, RecursionError, msgspec.DecodeError):
        return None


class Outbox:
    """Sends messages in a thread, so that Ctrl-C during a ``print`` cannot split one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # SimpleQueue.put is reentrant, so a signal cannot break it.
        self._waiting: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="notebook-sender", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send a message, as soon as those before it are sent."""
        self._waiting.put(message)

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._waiting.put(None)
        self._thread.join(_DELIVER_WITHIN_S)

    def _send_all(self) -> None:
        while (message := self._waiting.get()) is not None:
            send(self._connection, message)
