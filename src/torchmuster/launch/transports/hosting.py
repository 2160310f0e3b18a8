"""The transport to this host and to machines that join by themselves, with a code or with a shared secret."""

from collections.abc import Callable, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Arrive
from torchmuster.launch.transports.join import token_registry
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.invitation import certificate_seed, token_for
from torchmuster.launch.transports.join.service import JoinService
from torchmuster.launch.transports.local import LocalTransport


class HostTransport:
    """The first place is this host; each other place is for the machine that has its join code.

    With ``secret``, which all nodes share, each node knows its place and its code, and may join again with it.
    """

    def __init__(
        self,
        name: str,
        *,
        nodes: int,
        addresses: Sequence[str],
        port: int | None,
        announce: bool,
        on_event: Callable[[str], None],
        on_code: Callable[[int, JoinCode], None] = lambda place, code: None,
        secret: bytes | None = None,
    ) -> None:
        self._local = LocalTransport(name)
        self._on_code = on_code
        self._service = JoinService(
            count=nodes - 1,
            addresses=addresses,
            port=port,
            announce=announce,
            on_event=on_event,
            on_code=on_code,
            make_token=token_registry.new_token
            if secret is None
            else lambda place: token_for(secret, place),
            seed=None if secret is None else certificate_seed(secret),
        )

    @property
    def places(self) -> Sequence[str]:
        """This host, then the machines that join; names are unique."""
        names = [*self._local.places, *self._service.places]
        first_of = {name: place for place, name in reversed(list(enumerate(names)))}
        return [
            name if first_of[name] == place else f"{name} ({place + 1})"
            for place, name in enumerate(names)
        ]

    async def open(self, arrive: Arrive) -> None:
        """Start listening, report the join codes, and start the local node agent."""
        await self._service.open(arrive)
        for place, code in self._service.codes().items():
            self._on_code(place, code)
        await self._local.open(arrive)

    async def reopen(self, place: int) -> None:
        """Reconnect a machine: start a new local node agent, or make a new join code."""
        await (self._service if place else self._local).reopen(place)

    def waiting_for(self, place: int) -> str:
        """Return why a machine has not joined yet."""
        return (self._service if place else self._local).waiting_for(place)

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a machine will not join."""
        return (self._service if place else self._local).gave_up(place)

    def rejoins(self, place: int) -> bool:
        """Return whether a machine may rejoin with a new code: all but this host."""
        return place > 0

    async def close(self) -> None:
        """Stop listening and close all connections."""
        await self._service.close()
        await self._local.close()
