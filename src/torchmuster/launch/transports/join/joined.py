"""The launcher's end of the connection to a machine that has joined."""

from collections.abc import Callable

from torchmuster.launch import protocol
from torchmuster.launch.transports.join.stream import Stream


class JoinedChannel:
    """A channel (channel.py) over TLS.

    ``on_lost`` is called when the connection has ended; it is told whether the machine's ranks had
    been started by then, or the run was over.
    """

    def __init__(self, stream: Stream, name: str, on_lost: Callable[[bool], None]) -> None:
        self._stream = stream
        self._name = name
        self._started = False
        self._on_lost = on_lost
        stream.on_lost = self._lost

    def _lost(self) -> None:
        self._on_lost(self._started)

    async def send(self, message: protocol.ToKeeper) -> None:
        """Send a message; on a closed channel this does nothing."""
        if isinstance(message, protocol.Start | protocol.Leave):
            self._started = True
        await self._stream.send(protocol.encode(message))

    async def receive(self) -> protocol.FromKeeper | None:
        """Return the next message, or None when the machine has gone. Raises ``wire.Garbled``."""
        return await self._stream.receive(protocol.MESSAGE_LIMIT, protocol.decode_from_keeper)

    def why_closed(self) -> str:
        """Say what is known of the cause."""
        return f"{self._name}: {self._stream.why_closed}" if self._stream.why_closed else ""

    async def close(self) -> None:
        """Let go of the machine."""
        await self._stream.close()
