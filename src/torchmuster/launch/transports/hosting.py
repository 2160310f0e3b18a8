"""The transport to this host and to machines that join by themselves, with a code or with a shared key."""

from collections.abc import Callable, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Arrive
from torchmuster.launch.transports.join.code import JoinCode, certificate_seed, join_secret
from torchmuster.launch.transports.join.service import JoinService
from torchmuster.launch.transports.local import LocalTransport


class HostTransport:
    """The first place is this host; the other places are for the machines that join.

    ``on_code`` is called once with the join code. With ``key``, which all nodes share, each node knows its place and
    makes the code itself.
    """

    def __init__(
        self,
        name: str,
        *,
        nodes: int,
        addresses: Sequence[str],
        port: int | None,
        on_event: Callable[[str], None],
        on_code: Callable[[JoinCode], None] = lambda code: None,
        key: bytes | None = None,
    ) -> None:
        self._local = LocalTransport(name)
        self._on_code = on_code
        self._service = JoinService(
            count=nodes - 1,
            addresses=addresses,
            port=port,
            on_event=on_event,
            secret=None if key is None else join_secret(key),
            seed=None if key is None else certificate_seed(key),
        )

    @property
    def places(self) -> Sequence[str]:
        """This host, then the machines that join; names are unique."""
        names = [*self._local.places, *self._service.places]
        unique = []
        for place, name in enumerate(names):
            is_first = names.index(name) == place
            unique.append(name if is_first else f"{name} ({place + 1})")
        return unique

    async def open(self, arrive: Arrive) -> None:
        """Start listening, report the join code, and start the local node agent."""
        await self._service.open(arrive)
        self._on_code(self._service.code)
        await self._local.open(arrive)

    async def reopen(self, place: int) -> None:
        """Start a new local node agent, or let a machine join again."""
        await (self._service if place else self._local).reopen(place)

    def waiting_for(self, place: int) -> str:
        """Return why a machine has not joined yet."""
        return (self._service if place else self._local).waiting_for(place)

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a machine will not join."""
        return (self._service if place else self._local).gave_up(place)

    def rejoins(self, place: int) -> bool:
        """Return whether a machine may join again by itself: all but this host."""
        return place > 0

    async def close(self) -> None:
        """Stop listening and close all connections."""
        await self._service.close()
        await self._local.close()
