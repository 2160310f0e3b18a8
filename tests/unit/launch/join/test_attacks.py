"""Everybody who must not get in, and the real machine that gets in all the same."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import re
import ssl
from collections.abc import AsyncIterator

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.transports.join import (
    certificate,
    connection_handler,
    stream,
    token_registry,
)
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.stream import HEADER_BYTES
from torchmuster.launch.transports.join.token_registry import Join
from unit.launch.join.open_host import LOOPBACK, Host, join, open_host, proves_open

pytestmark = pytest.mark.usefixtures("time_enough")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def raw_connection(host: Host, *, tls: bool) -> AsyncIterator[Streams]:
    """Connect as anybody can who knows the port."""
    reader, writer = await asyncio.open_connection(
        LOOPBACK, host.service.port, ssl=certificate.client_context() if tls else None
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def is_closed_on(reader: asyncio.StreamReader) -> None:
    """Read to the end; whatever comes must not be an answer of our protocol."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        said = await asyncio.wait_for(reader.read(), GIVE_UP_S)
        assert b"welcome" not in said


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def join_message(code: JoinCode) -> bytes:
    return framed(
        token_registry.encode_join_message(
            Join(protocol=2, place=code.place, token=code.token, host="x", torchmuster="0")
        )
    )


def forged(code: JoinCode) -> JoinCode:
    return dataclasses.replace(code, token=hashlib.sha256(code.token).digest()[:16])


def test_a_wrong_token_is_refused_and_told_at_a_bounded_rate(snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        async with open_host() as host:
            real = host.service.codes()[1]
            for _ in range(20):
                with pytest.raises(Impossible) as caught:
                    await join(forged(real))
            assert str(caught.value) == snapshot
            assert host.events == snapshot  # once
            assert host.arrivals.empty()
            assert host.service.codes()[1] == real
            await proves_open(host)

    asyncio.run(story())


def test_a_token_works_once_and_who_used_it_is_named(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    async def story() -> None:
        monkeypatch.setattr("platform.node", lambda: "gpu-b")
        async with open_host(count=2) as host:
            code = host.service.codes()[1]
            machine = await join(code)
            with pytest.raises(Impossible) as caught:
                await join(code)
            assert " gpu-b (127.0.0.1) " in caught.value.why
            assert re.sub(r"\d+:\d+:\d+", "TIME", str(caught.value)) == snapshot
            _, channel = await host.arrivals.get()
            await channel.send(protocol.Alive())  # whoever was first is unharmed
            assert await machine.receive() == protocol.Alive()
            await proves_open(host)
            await machine.close()

    asyncio.run(story())


def test_of_two_machines_with_one_code_exactly_one_wins() -> None:
    async def story() -> None:
        async with open_host(count=2) as host:
            code = host.service.codes()[1]
            outcomes = await asyncio.gather(*(join(code) for _ in range(8)), return_exceptions=True)
            (winner,) = [one for one in outcomes if not isinstance(one, BaseException)]
            assert all(
                isinstance(one, Impossible) and "already been used" in one.what
                for one in outcomes
                if one is not winner
            )
            assert (await host.arrivals.get())[0] == 1
            assert host.arrivals.empty()
            await proves_open(host)
            await winner.close()

    asyncio.run(story())


def test_a_man_in_the_middle_hears_nothing(snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        async with open_host() as host:
            real = host.service.codes()[1]
            heard = bytearray()

            async def in_the_middle(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter
            ) -> None:
                # Passes everything on to the real host, and reads along.
                async with raw_connection(host, tls=True) as (_, onwards):
                    with contextlib.suppress(OSError):
                        while data := await reader.read(1000):
                            heard.extend(data)
                            onwards.write(data)
                writer.transport.abort()

            server = await asyncio.start_server(
                in_the_middle, LOOPBACK, 0, ssl=certificate.make_certificate().context
            )
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(MusterError) as caught:
                await join(dataclasses.replace(real, port=port))
            server.close()
            assert f"127.0.0.1:{port}" in caught.value.what
            assert str(caught.value).replace(str(port), "PORT") == snapshot
            assert bytes(heard) == b""
            assert host.service.codes()[1] == real
            await proves_open(host)

    asyncio.run(story())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(100_000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        framed(b"not json"),
        framed(b'{"kind": "hello"}'),
        framed(b'{"kind": "join", "place": 1}'),
        framed(b'{"kind": "join", "protocol": 2, "place": 1, "token": "AAAA", "host": "x"}'),
        framed(b"\xff\xfe"),
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        (2000).to_bytes(4, "big") + b"x" * 2000,
        b'\0\0\0\x02{"',
    ],
    ids=range(11),
)
def test_garbage_closes_the_connection(
    garbage: bytes, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tls:  # what is no handshake is waited for that long
        monkeypatch.setattr(connection_handler, "HANDSHAKE_S", 1)

    async def story() -> None:
        async with open_host() as host:
            async with raw_connection(host, tls=tls) as (reader, writer):
                writer.write(garbage)
                with contextlib.suppress(OSError):
                    await asyncio.wait_for(writer.drain(), GIVE_UP_S)
                await is_closed_on(reader)
            async with asyncio.timeout(GIVE_UP_S):
                while not host.events:  # told when the connection is closed
                    await asyncio.sleep(0.01)
            assert len(host.events) == 1
            assert "refused a connection" in host.events[0]
            assert host.arrivals.empty()
            await proves_open(host)

    asyncio.run(story())


def test_a_plain_join_message_without_tls_is_not_even_read(snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        async with open_host() as host:
            async with raw_connection(host, tls=False) as (reader, writer):
                writer.write(join_message(host.service.codes()[1]))
                await is_closed_on(reader)
            assert host.events == snapshot
            await proves_open(host)

    asyncio.run(story())


def test_an_older_tls_is_refused() -> None:
    async def story() -> None:
        async with open_host() as host:
            old = certificate.client_context()
            old.minimum_version = ssl.TLSVersion.TLSv1_2
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.open_connection(LOOPBACK, host.service.port, ssl=old)
            await proves_open(host)

    asyncio.run(story())


# Silence costs the host nothing; one byte makes it wait for more.
@pytest.mark.parametrize("word", [b"", b"x"])
def test_a_thousand_connections_that_do_not_join_keep_nobody_out(word: bytes) -> None:
    async def story() -> None:
        async with open_host() as host, contextlib.AsyncExitStack() as crowd:
            for _ in range(1000):
                _, writer = await crowd.enter_async_context(raw_connection(host, tls=False))
                writer.write(word)
            # From the same address, so it stands in line behind all of them.
            machine = await join(host.service.codes()[1])
            assert host.service._reception is not None
            assert len(host.service._reception._greeting) <= connection_handler.LISTENED_TO
            await machine.close()
            assert len(host.events) < 10

    asyncio.run(story())


def test_a_machine_from_elsewhere_does_not_stand_behind_a_crowd() -> None:
    async def story() -> None:
        async with (
            open_host(addresses=(LOOPBACK, "::1")) as host,
            contextlib.AsyncExitStack() as crowd,
        ):
            for _ in range(1500):
                _, writer = await crowd.enter_async_context(raw_connection(host, tls=False))
                writer.write(b"x")
            code = dataclasses.replace(host.service.codes()[1], addresses=("::1",))
            machine = await join(code)
            await machine.close()

    asyncio.run(story())


def test_those_who_wait_are_let_go_when_the_host_closes() -> None:
    async def story() -> None:
        async with contextlib.AsyncExitStack() as crowd:
            async with open_host() as host:
                readers = []
                for _ in range(connection_handler.LISTENED_TO + 50):
                    reader, writer = await crowd.enter_async_context(
                        raw_connection(host, tls=False)
                    )
                    writer.write(b"x")
                    readers.append(reader)
            for reader in readers:
                await is_closed_on(reader)

    asyncio.run(story())


def test_who_is_slow_is_cut_off_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(connection_handler, "JOIN_S", 1.5)

    async def story() -> None:
        async with open_host() as host:
            real = host.service.codes()[1]
            async with raw_connection(host, tls=True) as (reader, writer):
                closed = asyncio.create_task(is_closed_on(reader))
                for byte in join_message(forged(real)):  # a byte per half second
                    writer.write(bytes([byte]))
                    if (await asyncio.wait({closed}, timeout=0.5))[0]:
                        break
                await closed
            assert host.events == snapshot
            monkeypatch.setattr(connection_handler, "JOIN_S", GIVE_UP_S)
            await proves_open(host)

    asyncio.run(story())


def test_who_stops_in_the_middle_of_the_tls_handshake_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_handler, "HANDSHAKE_S", 1)

    async def story() -> None:
        async with open_host() as host:
            outgoing = ssl.MemoryBIO()
            tls = certificate.client_context().wrap_bio(ssl.MemoryBIO(), outgoing)
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            async with raw_connection(host, tls=False) as (reader, writer):
                writer.write(outgoing.read()[:50])
                await is_closed_on(reader)
            await proves_open(host)

    asyncio.run(story())


def test_too_long_a_message_of_a_joined_machine_ends_its_connection_alone() -> None:
    async def story() -> None:
        async with open_host(count=2) as host:
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(join_message(host.service.codes()[1]))
                _, channel = await host.arrivals.get()
                writer.write((protocol.MESSAGE_LIMIT + 1).to_bytes(4, "big") + b"x" * 100)
                with pytest.raises(protocol.UnreadableMessage, match="the limit is 4194304"):
                    await channel.receive()
                await asyncio.wait_for(reader.read(), GIVE_UP_S)
            assert await channel.receive() is None
            assert (await host.new_codes.get())[0] == 1
            await proves_open(host)

    asyncio.run(story())


def test_a_joined_machine_that_takes_nothing_holds_up_nobody_and_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "SEND_S", 0.5)

    async def story() -> None:
        async with open_host(count=2) as host:
            codes = host.service.codes()
            async with raw_connection(host, tls=True) as (_, writer):
                writer.write(join_message(codes[1]))
                _, deaf = await host.arrivals.get()
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                machine = await join(codes[2])
                _, channel = await host.arrivals.get()

                async def send_much() -> None:
                    much = protocol.Signal(name="x" * 2**20)
                    for _ in range(100):
                        await deaf.send(much)

                sending = asyncio.create_task(send_much())
                for _ in range(100):
                    await channel.send(protocol.Alive())
                    assert await machine.receive() == protocol.Alive()
                await asyncio.wait_for(sending, GIVE_UP_S)
            assert await deaf.receive() is None
            assert "0.5 s" in deaf.why_closed()
            await machine.close()

    asyncio.run(story())


def test_after_everything_at_once_the_real_machine_is_welcome() -> None:
    async def story() -> None:
        async with open_host() as host, contextlib.AsyncExitStack() as crowd:
            real = host.service.codes()[1]
            for number in range(90):
                _, writer = await crowd.enter_async_context(
                    raw_connection(host, tls=number % 3 == 0)
                )
                writer.write([b"", os.urandom(500), join_message(forged(real))][number % 3])
            outcomes = await asyncio.gather(
                *(join(forged(real)) for _ in range(10)), join(real), return_exceptions=True
            )
            assert all(isinstance(one, Impossible) for one in outcomes[:-1])
            machine = outcomes[-1]
            assert not isinstance(machine, BaseException), machine
            assert (await host.arrivals.get())[0] == 1
            await machine.close()

    asyncio.run(story())
