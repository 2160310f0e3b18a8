"""The transport to this machine: a keeper as a child process."""

import sys
from collections.abc import Sequence

from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Arrive
from torchmuster.launch.transports.pipe import PipeChannel

KEEPER = ("-m", "torchmuster.launch.node")


class LocalTransport:
    """One place: this machine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arrive: Arrive | None = None

    @property
    def places(self) -> Sequence[str]:
        """This machine."""
        return [self._name]

    async def open(self, arrive: Arrive) -> None:
        """Start the keeper."""
        self._arrive = arrive
        await self.reopen(0)

    async def reopen(self, place: int) -> None:
        """Start another keeper."""
        assert self._arrive is not None
        self._arrive(place, await PipeChannel.open([sys.executable, *KEEPER]))

    def waiting_for(self, place: int) -> str:
        """Say what is being waited for."""
        return "its keeper is starting"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Starting a process does not fail later."""
        return None

    def rejoins(self, place: int) -> bool:
        """Nobody comes by itself."""
        return False

    async def close(self) -> None:
        """Nothing to do: the channel is closed by whoever it was given to."""
