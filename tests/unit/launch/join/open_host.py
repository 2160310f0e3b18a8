"""A host that is open for machines to join, on loopback; and machines that join it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from patience import GIVE_UP_S
from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.join import client
from torchmuster.launch.transports.join.client import HostChannel
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.service import JoinService

LOOPBACK = "127.0.0.1"


@dataclass
class Host:
    """The service and everything that it told."""

    events: list[str] = field(default_factory=list)
    arrivals: "asyncio.Queue[tuple[int, Channel]]" = field(default_factory=asyncio.Queue)
    service: JoinService = field(init=False)


@asynccontextmanager
async def open_host(
    count: int = 1, addresses: tuple[str, ...] = (LOOPBACK,), first_place: int = 1
) -> AsyncIterator[Host]:
    host = Host()
    mishaps: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: mishaps.append(what))
    host.service = JoinService(
        count=count,
        addresses=addresses,
        first_place=first_place,
        on_event=host.events.append,
    )
    await host.service.open(lambda place, channel: host.arrivals.put_nowait((place, channel)))
    try:
        yield host
    finally:
        await host.service.close()
        await asyncio.sleep(0)  # callbacks of what was closed
        assert mishaps == []


def firewall_command(port: int) -> str:
    return f"sudo ufw allow {port}/tcp"


async def join(
    code: JoinCode,
    *,
    events: list[str] | None = None,
    patience_s: float = GIVE_UP_S,
    place: int | None = None,
) -> HostChannel:
    return await client.connect_to_host(
        code,
        on_event=(events if events is not None else []).append,
        open_firewall=firewall_command,
        place=place,
        patience_s=patience_s,
    )


async def proves_open(host: Host) -> None:
    """Let the real machine join, whatever went on before."""
    channel = await join(host.service.code)
    await asyncio.wait_for(host.arrivals.get(), GIVE_UP_S)
    await channel.close()
