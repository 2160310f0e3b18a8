"""Nodes that share a secret join by name, and join again when they were replaced."""

import asyncio

from patience import GIVE_UP_S
from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.join import certificate, client
from torchmuster.launch.transports.join.client import HostChannel
from torchmuster.launch.transports.join.code import (
    JoinCode,
    certificate_seed,
    join_secret,
    key_from,
)
from torchmuster.launch.transports.join.service import JoinService
from unit.launch.join.open_host import LOOPBACK, firewall_command, open_host
from unit.launch.join.open_host import join as join_with

KEY = key_from("correct horse battery staple")


def code(key: bytes, port: int) -> JoinCode:
    return JoinCode(
        port=port,
        secret=join_secret(key),
        fingerprint=certificate.fingerprint_from(certificate_seed(key)),
    )


async def join(key: bytes, port: int, events: list[str]) -> HostChannel:
    return await client.connect_to_host(
        code(key, port),
        place=1,
        on_event=events.append,
        open_firewall=firewall_command,
        patience_s=GIVE_UP_S,
        name="localhost",
    )


def test_a_node_waits_for_its_place_and_takes_it_again() -> None:
    async def story() -> None:
        arrivals: asyncio.Queue[tuple[int, Channel]] = asyncio.Queue()
        service = JoinService(
            count=1,
            addresses=[LOOPBACK],
            on_event=lambda _: None,
            secret=join_secret(KEY),
            seed=certificate_seed(KEY),
        )
        await service.open(lambda place, channel: arrivals.put_nowait((place, channel)))
        told: asyncio.Queue[str] = asyncio.Queue()
        first = await join(KEY, service.code.port, [])
        await arrivals.get()
        again = asyncio.create_task(
            client.connect_to_host(
                code(KEY, service.code.port),
                place=1,
                on_event=told.put_nowait,
                open_firewall=firewall_command,
                patience_s=GIVE_UP_S,
                name="localhost",
            )
        )
        assert "an earlier connection of this node" in await told.get()
        await service.reopen(1)  # the launcher has noticed that the first one is lost
        second = await again
        place, _ = await arrivals.get()
        assert place == 1
        for channel in (first, second):
            await channel.close()
        await service.close()

    asyncio.run(asyncio.wait_for(story(), GIVE_UP_S))


def test_a_connection_whose_close_was_given_up_can_be_closed_again() -> None:
    async def story() -> None:
        async with open_host() as host:
            machine = await join_with(host.service.code)
            channel = host.service._channels[1]
            closing = asyncio.create_task(channel.close())
            await asyncio.sleep(0)  # it waits for the other side
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await channel.close()  # as the launcher does when it reconnects a lost host
            await machine.close()

    asyncio.run(asyncio.wait_for(story(), GIVE_UP_S))


def test_different_secrets_have_different_certificates_and_codes() -> None:
    other = key_from("correct horse battery stable")
    assert code(KEY, 1).fingerprint != code(other, 1).fingerprint
    assert code(KEY, 1).secret != code(other, 1).secret
