"""Everybody who must not get in, and the real machine that gets in all the same."""

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator

import msgspec
import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.transports.join import certificate, messages, stream, transport
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import JOIN_LIMIT, Join
from torchmuster.launch.transports.join.stream import HEADER_BYTES
from unit.launch.join.open_host import LOOPBACK, Host, join, proves_open, with_host

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_JOIN = (
    b'{"kind":"join","protocol":%b,"place":%b,"secret":"AAAAAAAAAAAAAAAAAAAAAA==",'
    b'"host":"%b","torchmuster":"0"}'
)
# Deeper than Python's recursion limit, within the size that a stranger may send.
NESTED = b'{"kind":"join","x":' + b"[" * 4000
HOSTILE_JOINS = {
    "not JSON": b"not json",
    "another kind": b'{"kind": "hello"}',
    "fields missing": b'{"kind": "join", "place": 1}',
    "short secret": b'{"kind": "join", "protocol": 2, "secret": "AAAA", "host": "x"}',
    "nested lists": NESTED,
    "nested objects": b'{"kind":"join","x":' + b'{"":' * 1000,
    "invalid UTF-8": _JOIN % (b"1", b"1", b"\xff\xfe"),
    "half a surrogate": _JOIN % (b"1", b"1", b"\\ud800"),
    "huge protocol": _JOIN % (b"9" * 800, b"1", b"x"),
    "negative place": _JOIN % (b"1", b"-1", b"x"),
    "NaN": _JOIN % (b"NaN", b"1", b"x"),
}
HOSTILE_FRAMES = {
    "nested lists": b'{"kind":"alive","x":' + b"[" * 100_000,
    "invalid UTF-8": b'{"kind":"output","rank":0,"text":"\xff"}',
    "huge integer": b'{"kind":"output","rank":' + b"9" * 4000 + b',"text":""}',
    "NaN": b'{"kind":"waiting","words":NaN}',
    "unknown kind": b'{"kind":"explode"}',
}


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES, "big") + data


GARBAGE = {
    "random": os.urandom(100_000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "empty message": b"\0\0\0\0",
    "4 GiB": b"\xff\xff\xff\xff",
    "over the limit": (JOIN_LIMIT + 1).to_bytes(4, "big") + b"x" * (JOIN_LIMIT + 1),
    **{name: framed(message) for name, message in HOSTILE_JOINS.items()},
}


@contextlib.asynccontextmanager
async def raw_connection(host: Host, *, tls: bool) -> AsyncIterator[Streams]:
    """Connect as anybody can who knows the port."""
    context = certificate.client_context() if tls else None
    reader, writer = await asyncio.open_connection(LOOPBACK, host.code.port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def is_closed_on(reader: asyncio.StreamReader) -> None:
    """Read to the end; whatever comes must not be an answer of our protocol."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        answer = await asyncio.wait_for(reader.read(), GIVE_UP_S)
        assert b"welcome" not in answer


def join_message(code: JoinCode) -> bytes:
    request = Join(protocol=protocol.PROTOCOL, secret=code.secret, host="x", torchmuster="0")
    return framed(msgspec.json.encode(request))


def forged(code: JoinCode) -> JoinCode:
    return msgspec.structs.replace(code, secret=code.secret[:-1] + bytes([code.secret[-1] ^ 1]))


def test_a_wrong_code_is_refused_and_reported_once(snapshot: SnapshotAssertion) -> None:
    async def scene(host: Host) -> None:
        for _ in range(20):
            with pytest.raises(Impossible) as caught:
                await join(forged(host.code))
        assert str(caught.value) == snapshot
        assert host.events == snapshot  # once
        assert host.arrivals.empty()
        await proves_open(host)

    with_host(scene)


def test_a_man_in_the_middle_gets_nothing() -> None:
    async def scene(host: Host) -> None:
        received = bytearray()

        async def in_the_middle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1000):
                    received.extend(data)
            writer.transport.abort()

        own = certificate.make_certificate()
        server = await asyncio.start_server(in_the_middle, LOOPBACK, 0, ssl=own.context)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(MusterError, match="is not the host of this join code") as caught:
            await join(msgspec.structs.replace(host.code, port=port))
        server.close()
        assert f"127.0.0.1:{port}" in caught.value.what
        assert bytes(received) == b""
        await proves_open(host)

    with_host(scene)


def test_what_was_recorded_of_a_machine_that_joined_lets_nobody_in() -> None:
    async def scene(host: Host) -> None:
        sent = bytearray()

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Pass the bytes of TLS on to the real host, and keep those of the machine."""
            onward_reader, onward = await asyncio.open_connection(LOOPBACK, host.code.port)

            async def pass_on(
                source: asyncio.StreamReader, to: asyncio.StreamWriter, copy: bytearray
            ) -> None:
                while data := await source.read(2**16):
                    copy.extend(data)
                    to.write(data)

            with contextlib.suppress(ConnectionError):
                await asyncio.gather(
                    pass_on(reader, onward, sent), pass_on(onward_reader, writer, bytearray())
                )
            onward.close()
            writer.close()

        server = await asyncio.start_server(record, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        machine = await join(msgspec.structs.replace(host.code, port=port))
        await host.arrivals.get()
        for _ in range(5):
            async with raw_connection(host, tls=False) as (reader, writer):
                writer.write(bytes(sent))
                await is_closed_on(reader)
        assert host.arrivals.empty()
        await machine.close()
        server.close()
        await proves_open(host)

    with_host(scene, count=3)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_garbage_closes_the_connection(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tls:  # what is no handshake is waited for that long
        monkeypatch.setattr(transport, "GREET_S", 1)

    async def scene(host: Host) -> None:
        async def send(garbage: bytes) -> None:
            async with raw_connection(host, tls=tls) as (reader, writer):
                writer.write(garbage)
                with contextlib.suppress(OSError):
                    await asyncio.wait_for(writer.drain(), GIVE_UP_S)
                await is_closed_on(reader)

        await asyncio.gather(*map(send, GARBAGE.values()))
        assert host.arrivals.empty()
        monkeypatch.setattr(transport, "GREET_S", GIVE_UP_S)
        await proves_open(host)

    with_host(scene)


def test_an_older_tls_is_refused() -> None:
    async def scene(host: Host) -> None:
        old = certificate.client_context()
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection(LOOPBACK, host.code.port, ssl=old)
        await proves_open(host)

    with_host(scene)


def test_a_slow_client_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GREET_S", 1.5)

    async def scene(host: Host) -> None:
        async with raw_connection(host, tls=True) as (reader, writer):
            closed = asyncio.create_task(is_closed_on(reader))
            for byte in join_message(forged(host.code)):  # a byte per half second
                writer.write(bytes([byte]))
                if (await asyncio.wait({closed}, timeout=0.5))[0]:
                    break
            await closed
        monkeypatch.setattr(transport, "GREET_S", GIVE_UP_S)
        await proves_open(host)

    with_host(scene)


def test_1000_hostile_clients_keep_nobody_out_and_leave_nothing() -> None:
    """Silent, slow, garbage, and wrong codes, all at once: the honest machine joins among them."""

    async def scene(host: Host) -> None:
        before = psutil.Process().num_fds()
        most_unproven = 0
        async with contextlib.AsyncExitStack() as crowd:
            for number in range(1000):
                connection = raw_connection(host, tls=False)
                _, writer = await crowd.enter_async_context(connection)
                writer.write(
                    [b"", b"\x16", os.urandom(500), join_message(forged(host.code))][number % 4]
                )
                most_unproven = max(most_unproven, len(host.transport._unproven))
            wrong = [join(forged(host.code)) for _ in range(10)]
            began_s = time.monotonic()
            outcomes = await asyncio.gather(*wrong, join(host.code), return_exceptions=True)
            print(f"joined after {time.monotonic() - began_s:.1f} s")
            assert [type(outcome) for outcome in outcomes[:-1]] == [Impossible] * 10
            machine = outcomes[-1]
            assert not isinstance(machine, BaseException), machine
            await host.arrivals.get()
            assert host.arrivals.empty()
            await machine.close()
        assert most_unproven <= transport.MOST_UNPROVEN
        async with asyncio.timeout(GIVE_UP_S):
            while host.transport._unproven or psutil.Process().num_fds() > before:
                await asyncio.sleep(0.05)

    with_host(scene)


def test_any_error_while_a_stranger_is_heard_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    async def scene(host: Host) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(messages, "decode_join", broken)
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(framed(b"{}"))
                await is_closed_on(reader)
        await proves_open(host)

    with_host(scene)


@pytest.mark.parametrize("frame", HOSTILE_FRAMES.values(), ids=HOSTILE_FRAMES)
def test_hostile_frame_of_a_joined_machine_or_of_the_host_ends_its_connection_alone(
    frame: bytes,
) -> None:
    async def scene(host: Host) -> None:
        good = await join(host.code)
        _, other = await host.arrivals.get()
        machine = await join(host.code)
        _, channel = await host.arrivals.get()
        await machine._stream.send(frame)
        await other._stream.send(frame)  # type: ignore[attr-defined]
        for end in (channel, good):
            with pytest.raises(protocol.UnreadableMessage) as caught:
                await end.receive()
            assert len(str(caught.value)) < 300
            assert await end.receive() is None
        await proves_open(host)
        await machine.close()

    with_host(scene, count=3)


def test_too_long_a_message_of_a_joined_machine_ends_its_connection_alone() -> None:
    async def scene(host: Host) -> None:
        async with raw_connection(host, tls=True) as (reader, writer):
            writer.write(join_message(host.code))
            _, channel = await host.arrivals.get()
            writer.write((protocol.MESSAGE_LIMIT + 1).to_bytes(4, "big") + b"x" * 100)
            with pytest.raises(protocol.UnreadableMessage, match="the limit is 4194304"):
                await channel.receive()
            await asyncio.wait_for(reader.read(), GIVE_UP_S)
        await proves_open(host)

    with_host(scene, count=2)


def test_a_joined_machine_that_takes_nothing_holds_up_nobody_and_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "SEND_S", 0.5)

    async def scene(host: Host) -> None:
        async with raw_connection(host, tls=True) as (_, writer):
            writer.write(join_message(host.code))
            _, deaf = await host.arrivals.get()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            machine = await join(host.code)
            _, channel = await host.arrivals.get()

            async def send_much() -> None:
                for _ in range(100):
                    await deaf.send(protocol.Signal(name="x" * 2**20))

            sending = asyncio.create_task(send_much())
            for _ in range(100):
                await channel.send(protocol.Alive())
                assert await machine.receive() == protocol.Alive()
            await asyncio.wait_for(sending, GIVE_UP_S)
        assert await deaf.receive() is None
        assert "0.5 s" in deaf.why_closed()
        await machine.close()

    with_host(scene, count=2)


@pytest.mark.parametrize(
    "frame",
    [HOSTILE_FRAMES["nested lists"], NESTED, b'{"kind":"welcome","protocol":%b}' % (b"9" * 800)],
    ids=["nested", "join", "huge integer"],
)
def test_hostile_answer_of_a_host_is_no_answer(frame: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage):
        messages.decode_answer(frame)
