"""Joining for real: sockets, TLS and messages on loopback."""

import asyncio
import socket

import msgspec
import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.join import client, messages
from torchmuster.launch.transports.join import code as codes
from torchmuster.launch.transports.join.certificate import pin_from_seed
from torchmuster.launch.transports.join.code import JoinCode, shared_key
from torchmuster.launch.transports.join.transport import JoinTransport
from unit.launch.join.open_host import LOOPBACK, Host, join, open_host, proves_open, with_host

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
    async def scene(host: Host) -> None:
        assert host.transport.places == ["machine 1", "machine 2"]
        machine = await join(codes.decode_code(codes.encode_code(host.code)), place=1)
        place, channel = await host.arrivals.get()
        assert place == 1
        assert host.transport.places[0] == "machine 1"
        assert host.transport.places[1] != "machine 2"
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

    with_host(scene, count=2)


def test_the_launcher_frees_the_place_of_a_lost_machine() -> None:
    async def scene(host: Host) -> None:
        machine = await join(host.code)
        _, channel = await host.arrivals.get()
        await machine.close()
        assert await channel.receive() is None
        with pytest.raises(Impossible, match="have joined"):
            await join(host.code)
        await host.transport.reopen(0)
        assert host.transport.places == ["machine 1"]
        assert host.transport.waiting_for(0) == "not connected"
        await proves_open(host)

    with_host(scene)


def test_a_name_cannot_control_the_hosts_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(host: Host) -> None:
        monkeypatch.setattr("platform.node", lambda: "evil\x1b[2J\n")
        machine = await join(host.code)
        assert host.transport.places == ["evil�[2J�"]
        await machine.close()

    with_host(scene)


def test_several_addresses_share_one_port_and_the_first_that_answers_is_taken() -> None:
    async def scene() -> None:
        async with open_host(addresses=("127.0.0.1", "127.0.0.2", "::1")) as host:
            code = host.code
            assert code.addresses == ("127.0.0.1", "127.0.0.2", "::1")  # there is nothing else
            # 127.0.0.99 refuses: it must not stand in the way.
            addresses = ("127.0.0.99", "::1")
            machine = await join(msgspec.structs.replace(code, addresses=addresses))
            assert machine.host == f"[::1]:{code.port}"
            await machine.close()

    asyncio.run(scene())


def test_a_machine_with_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(host: Host) -> None:
        real = messages.Join
        monkeypatch.setattr(client, "Join", lambda **fields: real(**(fields | {"protocol": 99})))
        with pytest.raises(Impossible) as caught:
            await join(host.code)
        monkeypatch.undo()
        assert f"uses protocol 99, the host uses {protocol.PROTOCOL}" in caught.value.why
        assert "pip install torchmuster==" in caught.value.fix
        await proves_open(host)

    with_host(scene)


def test_a_port_that_is_taken_and_an_address_that_is_not_here_are_named() -> None:
    async def open_at(address: str, port: int) -> None:
        transport = JoinTransport(count=1, addresses=[address], ports=[port], on_event=print)
        await transport.open(lambda place, channel: None)

    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Impossible, match=f"port {port} is in use"):
            asyncio.run(open_at(LOOPBACK, port))
    with pytest.raises(Impossible, match=r"192\.0\.2\.77"):
        asyncio.run(open_at("192.0.2.77", 0))


def test_a_node_that_shares_a_secret_waits_for_its_place_and_takes_it_again() -> None:
    async def scene() -> None:
        key = shared_key("correct horse battery staple")
        arrivals: asyncio.Queue[tuple[int, Channel]] = asyncio.Queue()
        transport = JoinTransport(count=1, addresses=[LOOPBACK], on_event=print, key=key)
        await transport.open(lambda place, channel: arrivals.put_nowait((place, channel)))
        port = transport.code.port
        code = JoinCode(port=port, secret=key.secret, pin=pin_from_seed(key.seed))
        first = await join(code, place=0, name="localhost")
        await arrivals.get()
        events: list[str] = []
        again = asyncio.create_task(join(code, place=0, name="localhost", events=events))
        while not events:
            await asyncio.sleep(0.01)
        assert "an earlier connection of this node" in events[0]
        await transport.reopen(0)  # the launcher has noticed that the first one is lost
        second = await again
        assert (await arrivals.get())[0] == 0
        for channel in (first, second):
            await channel.close()
        await transport.close()

    asyncio.run(asyncio.wait_for(scene(), GIVE_UP_S))
