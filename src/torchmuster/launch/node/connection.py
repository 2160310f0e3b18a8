"""The node agent's end of its connection to the launcher, on a pipe."""

import asyncio
import os
import sys
import threading
from typing import Protocol

from torchmuster.launch import protocol


class AgentConnection(Protocol):
    """Interface of a node agent's connection to the launcher."""

    async def receive(self) -> protocol.ToAgent | None:
        """Return the next message, or None when the launcher is gone."""

    async def send(self, message: protocol.FromAgent) -> None:
        """Send a message; drop it if the connection is closed."""

    async def close(self) -> None:
        """Close the connection."""


class PipeConnection:
    """Standard input and output.

    Read and written by threads, because not every system can wait for pipes in an event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[protocol.ToAgent | None] = asyncio.Queue()
        # Output of ranks or libraries must not mix with the messages.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._writing = asyncio.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    async def receive(self) -> protocol.ToAgent | None:
        """Return the next message, or None when the launcher is gone."""
        return await self._messages.get()

    async def send(self, message: protocol.FromAgent) -> None:
        """Send a message."""
        data = protocol.to_line(message)
        async with self._writing:
            await asyncio.to_thread(self._write, data)

    async def close(self) -> None:
        """Do nothing: the pipe closes with the process."""

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._out.write(view) or 0 :]
        except OSError:
            self._deliver(None)

    def _read(self) -> None:
        try:
            for line in iter(self._read_line, b""):
                self._deliver(protocol.decode_to_agent(protocol.from_line(line)))
        except (OSError, protocol.UnreadableMessage) as error:
            print(f"torchmuster: cannot decode the launcher's message: {error}", file=sys.stderr)
        self._deliver(None)

    def _read_line(self) -> bytes:
        return sys.stdin.buffer.readline(protocol.MESSAGE_LIMIT + 1)

    def _deliver(self, message: protocol.ToAgent | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
        except RuntimeError:  # the event loop has stopped
            return
