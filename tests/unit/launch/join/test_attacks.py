"""Everybody who must not get in, and the real machine that gets in all the same."""

import asyncio
import contextlib
import hashlib
import os
import ssl
from collections.abc import AsyncIterator

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.transports.join import certificate, messages, service, stream
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Join
from torchmuster.launch.transports.join.stream import HEADER_BYTES
from unit.launch.join.open_host import LOOPBACK, Host, join, open_host, proves_open

pytestmark = pytest.mark.usefixtures("time_enough")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def raw_connection(host: Host, *, tls: bool) -> AsyncIterator[Streams]:
    """Connect as anybody can who knows the port."""
    reader, writer = await asyncio.open_connection(
        LOOPBACK, host.service.code.port, ssl=certificate.client_context() if tls else None
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
    join = Join(protocol=protocol.PROTOCOL, secret=code.secret, host="x", torchmuster="0")
    return framed(messages.encode_join_message(join))


def forged(code: JoinCode) -> JoinCode:
    return msgspec.structs.replace(code, secret=hashlib.sha256(code.secret).digest()[:16])


def test_a_wrong_code_is_refused_and_reported_once(snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        async with open_host() as host:
            real = host.service.code
            for _ in range(20):
                with pytest.raises(Impossible) as caught:
                    await join(forged(real))
            assert str(caught.value) == snapshot
            assert host.events == snapshot  # once
            assert host.arrivals.empty()
            await proves_open(host)

    asyncio.run(story())


def test_a_man_in_the_middle_hears_nothing(snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        async with open_host() as host:
            real = host.service.code
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
                await join(msgspec.structs.replace(real, port=port))
            server.close()
            assert f"127.0.0.1:{port}" in caught.value.what
            assert str(caught.value).replace(str(port), "PORT") == snapshot
            assert bytes(heard) == b""
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
        framed(b'{"kind": "join", "protocol": 2, "place": 1, "secret": "AAAA", "host": "x"}'),
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
        monkeypatch.setattr(service, "HANDSHAKE_S", 1)

    async def story() -> None:
        async with open_host() as host:
            async with raw_connection(host, tls=tls) as (reader, writer):
                writer.write(garbage)
                with contextlib.suppress(OSError):
                    await asyncio.wait_for(writer.drain(), GIVE_UP_S)
                await is_closed_on(reader)
            assert host.arrivals.empty()
            await proves_open(host)

    asyncio.run(story())


def test_an_older_tls_is_refused() -> None:
    async def story() -> None:
        async with open_host() as host:
            old = certificate.client_context()
            old.minimum_version = ssl.TLSVersion.TLSv1_2
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.open_connection(LOOPBACK, host.service.code.port, ssl=old)
            await proves_open(host)

    asyncio.run(story())


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_connections_that_do_not_join_keep_nobody_out(sent: bytes) -> None:
    async def story() -> None:
        async with open_host() as host, contextlib.AsyncExitStack() as crowd:
            for _ in range(300):
                _, writer = await crowd.enter_async_context(raw_connection(host, tls=False))
                writer.write(sent)
            await proves_open(host)

    asyncio.run(story())


def test_who_is_slow_is_cut_off_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "JOIN_S", 1.5)

    async def story() -> None:
        async with open_host() as host:
            real = host.service.code
            async with raw_connection(host, tls=True) as (reader, writer):
                closed = asyncio.create_task(is_closed_on(reader))
                for byte in join_message(forged(real)):  # a byte per half second
                    writer.write(bytes([byte]))
                    if (await asyncio.wait({closed}, timeout=0.5))[0]:
                        break
                await closed
            monkeypatch.setattr(service, "JOIN_S", GIVE_UP_S)
            await proves_open(host)

    asyncio.run(story())


def test_too_long_a_message_of_a_joined_machine_ends_its_connection_alone() -> None:
    async def story() -> None:
        async with open_host(count=2) as host:
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(join_message(host.service.code))
                _, channel = await host.arrivals.get()
                writer.write((protocol.MESSAGE_LIMIT + 1).to_bytes(4, "big") + b"x" * 100)
                with pytest.raises(protocol.UnreadableMessage, match="the limit is 4194304"):
                    await channel.receive()
                await asyncio.wait_for(reader.read(), GIVE_UP_S)
            assert await channel.receive() is None
            await proves_open(host)

    asyncio.run(story())


def test_a_joined_machine_that_takes_nothing_holds_up_nobody_and_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "SEND_S", 0.5)

    async def story() -> None:
        async with open_host(count=2) as host:
            async with raw_connection(host, tls=True) as (_, writer):
                writer.write(join_message(host.service.code))
                _, deaf = await host.arrivals.get()
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                machine = await join(host.service.code)
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
            real = host.service.code
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
            await host.arrivals.get()
            await machine.close()

    asyncio.run(story())
