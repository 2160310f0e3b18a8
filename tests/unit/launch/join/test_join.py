"""Joining for real: sockets, TLS and messages on loopback."""

import asyncio
import re
import socket

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible, NotNow
from torchmuster.launch import protocol
from torchmuster.launch.transports.join import client, messages
from torchmuster.launch.transports.join import code as codes
from torchmuster.launch.transports.join.service import JoinService, open_listeners
from unit.launch.join.open_host import join, open_host, proves_open

pytestmark = pytest.mark.usefixtures("time_enough")

START = protocol.Start(
    attempt=0,
    node_rank=1,
    nodes=2,
    first_rank=1,
    world_size=2,
    address="127.0.0.1",
    port=29400,
    interface=None,
    max_restarts=0,
)


def test_messages_go_both_ways_once_a_machine_has_joined() -> None:
    async def story() -> None:
        async with open_host(count=2) as host:
            assert host.service.places == ["machine 2", "machine 3"]
            typed = codes.encode_code(host.service.code)
            machine = await join(codes.decode_code(typed), place=2)
            place, channel = await host.arrivals.get()
            assert place == 2
            assert host.service.places[0] == "machine 2"
            assert host.service.places[1] != "machine 3"
            long = protocol.Output(rank=1, text="ü" * 200_000)
            await machine.send(long)
            assert await channel.receive() == long
            await channel.send(START)
            assert await machine.receive() == START
            await channel.close()
            assert await machine.receive() is None
            assert "closed the connection" in machine.why_closed()
            await machine.send(protocol.Alive())  # nothing happens
            await machine.close()

    asyncio.run(story())


def test_whoever_gives_up_waiting_for_a_message_can_ask_for_it_again() -> None:
    async def story() -> None:
        async with open_host() as host:
            code = host.service.code
            machine = await join(code)
            _, channel = await host.arrivals.get()
            writer = machine._stream.writer
            message = protocol.encode(protocol.Waiting(words="for GPUs"))
            writer.write(len(message).to_bytes(4, "big") + message[:5])
            receiving = asyncio.create_task(channel.receive())
            while not channel._stream._received:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            writer.write(message[5:])
            assert await channel.receive() == protocol.Waiting(words="for GPUs")
            await machine.close()

    asyncio.run(story())


def test_a_machine_lost_before_the_start_loses_its_place() -> None:
    async def story() -> None:
        async with open_host() as host:
            first_code = host.service.code
            machine = await join(first_code)
            _, channel = await host.arrivals.get()
            await machine.close()
            assert await channel.receive() is None
            assert "closed the connection" in channel.why_closed()
            assert host.service.places == ["machine 2"]
            assert re.search(r"connection was lost \d+ s", host.service.waiting_for(1))
            await proves_open(host)

    asyncio.run(story())


def test_a_machine_that_was_sent_away_keeps_its_place() -> None:
    async def story() -> None:
        async with open_host() as host:
            machine = await join(host.service.code)
            _, channel = await host.arrivals.get()
            await channel.send(protocol.Leave(exit_code=1, words="the run has ended"))
            assert isinstance(await machine.receive(), protocol.Leave)
            await machine.close()
            assert await channel.receive() is None
            with pytest.raises(Impossible, match="have joined"):
                await join(host.service.code)

    asyncio.run(story())


def test_a_machine_lost_after_the_start_may_join_when_it_is_called_again() -> None:
    async def story() -> None:
        async with open_host() as host:
            machine = await join(host.service.code)
            _, channel = await host.arrivals.get()
            await channel.send(START)
            assert await machine.receive() == START
            await machine.close()
            assert await channel.receive() is None
            with pytest.raises(Impossible, match="have joined"):
                await join(host.service.code)
            await host.service.reopen(1)
            await proves_open(host)

    asyncio.run(story())


def test_closing_the_host_ends_every_connection() -> None:
    async def story() -> None:
        async with open_host() as host:
            machine = await join(host.service.code)
        assert await machine.receive() is None
        await machine.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", host.service.code.port)

    asyncio.run(story())


def test_several_addresses_share_one_port_and_the_first_to_answer_is_taken() -> None:
    async def story() -> None:
        async with open_host(addresses=("127.0.0.1", "127.0.0.2", "::1")) as host:
            code = host.service.code
            assert code.addresses == ("127.0.0.1", "127.0.0.2", "::1")  # there is nothing else
            # 127.0.0.99 refuses: it must not stand in the way.
            addresses = ("127.0.0.99", "::1")
            machine = await join(msgspec.structs.replace(code, addresses=addresses))
            assert str(machine.host) == f"[::1]:{code.port}"
            await machine.close()

    asyncio.run(story())


def test_places_may_begin_with_the_first_machine() -> None:
    async def story() -> None:
        async with open_host(count=2, first_place=0) as host:
            assert host.service.places == ["machine 1", "machine 2"]
            assert host.service.gave_up(0) is None
            assert re.search(r"not connected yet, \d+ s$", host.service.waiting_for(0))

    asyncio.run(story())


def test_a_machine_that_speaks_another_protocol_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with open_host() as host:
            code = host.service.code
            real = messages.Join
            monkeypatch.setattr(
                client,
                "Join",
                lambda **fields: real(**{**fields, "protocol": 99, "torchmuster": "99.0"}),
            )
            with pytest.raises(Impossible) as caught:
                await join(code)
            monkeypatch.undo()
            assert "the host has torchmuster" in caught.value.what
            assert "uses protocol 99, the host uses 2" in caught.value.why
            assert "pip install torchmuster==" in caught.value.fix
            await proves_open(host)

    asyncio.run(story())


def test_a_name_cannot_steer_the_hosts_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with open_host() as host:
            monkeypatch.setattr("platform.node", lambda: "evil\x1b[2J\n")
            machine = await join(host.service.code)
            assert host.service.places == ["evil�[2J�"]
            await machine.close()

    asyncio.run(story())


def test_a_port_that_is_taken_is_named() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            service = JoinService(
                count=1,
                addresses=["127.0.0.1"],
                port=port,
                on_event=print,
            )
            with pytest.raises(NotNow) as caught:
                await service.open(lambda place, channel: None)
            assert caught.value.what == f"port {port} is in use on 127.0.0.1"
            await service.close()

    asyncio.run(story())


def test_an_address_that_is_not_of_this_machine_is_named(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match=r"192\.0\.2\.77"):
        open_listeners(["127.0.0.1", "192.0.2.77"], None)
    with pytest.raises(Impossible, match="'gpu-a'") as refused:
        open_listeners(["gpu-a"], None)
    assert refused.value == snapshot


def test_more_machines_than_a_run_can_have_are_refused() -> None:
    with pytest.raises(Impossible, match="65537 machines cannot join"):
        JoinService(count=65536, addresses=["127.0.0.1"], on_event=print)


def test_machines_without_a_place_get_the_first_free_one() -> None:
    async def story() -> None:
        async with open_host(count=3) as host:
            machines = [await join(host.service.code, place=2)]
            machines += [await join(host.service.code) for _ in range(2)]
            places = [(await host.arrivals.get())[0] for _ in machines]
            assert places == [2, 1, 3]
            for machine in machines:
                await machine.close()

    asyncio.run(story())
