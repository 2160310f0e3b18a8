"""A host that is open for machines to join, on loopback; and machines that join it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from patience import GIVE_UP_S
from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.join import client
from torchmuster.launch.transports.join.client import HostChannel
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.transport import JoinTransport

LOOPBACK = "127.0.0.1"


@dataclass
class Host:
    """The transport and everything that it reported."""

    events: list[str] = field(default_factory=list)
    arrivals: "asyncio.Queue[tuple[int, Channel]]" = field(default_factory=asyncio.Queue)
    transport: JoinTransport = field(init=False)

    @property
    def code(self) -> JoinCode:
        return self.transport.code


@asynccontextmanager
async def open_host(
    count: int = 1, addresses: tuple[str, ...] = (LOOPBACK,)
) -> AsyncIterator[Host]:
    host = Host()
    mishaps: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: mishaps.append(what))
    host.transport = JoinTransport(count=count, addresses=addresses, on_event=host.events.append)
    await host.transport.open(lambda place, channel: host.arrivals.put_nowait((place, channel)))
    try:
        yield host
    finally:
        await host.transport.close()
        await asyncio.sleep(0)  # callbacks of what was closed
        assert mishaps == []


def with_host(scene: Callable[[Host], Awaitable[None]], count: int = 1) -> None:
    """Run a scene with an open host."""

    async def run() -> None:
        async with open_host(count) as host:
            await scene(host)

    asyncio.run(asyncio.wait_for(run(), 2 * GIVE_UP_S))


async def join(
    code: JoinCode,
    *,
    events: list[str] | None = None,
    patience_s: float = GIVE_UP_S,
    place: int | None = None,
    name: str = "",
) -> HostChannel:
    return await client.connect_to_host(
        code,
        on_event=(events if events is not None else []).append,
        place=place,
        patience_s=patience_s,
        name=name,
    )


async def proves_open(host: Host) -> None:
    """Let the real machine join, whatever went on before."""
    channel = await join(host.code)
    await asyncio.wait_for(host.arrivals.get(), GIVE_UP_S)
    await channel.close()
