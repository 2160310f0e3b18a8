"""Frames that break a decoder close their own connection, free what it held, and nothing else."""

import asyncio

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.launcher.node_handle import NodeHandle
from torchmuster.launch.transports.join import service, token_registry
from torchmuster.launch.transports.join.token_registry import JOIN_LIMIT
from unit.launch.join.open_host import Host, join, open_host, proves_open
from unit.launch.join.test_attacks import framed, is_closed_on, join_message, raw_connection

pytestmark = pytest.mark.usefixtures("time_enough")

# Deeper than Python's recursion limit, within the size that a stranger may send.
NESTED = b'{"kind":"join","x":' + b"[" * 1000
_JOIN = (
    b'{"kind":"join","protocol":%b,"place":%b,"token":"AAAAAAAAAAAAAAAAAAAAAA==",'
    b'"host":"%b","torchmuster":"0"}'
)
HOSTILE = {
    "nested lists": NESTED,
    "nested objects": b'{"kind":"join","x":' + b'{"":' * 250,
    "invalid UTF-8": _JOIN % (b"1", b"1", b"\xff\xfe"),
    "half a surrogate": _JOIN % (b"1", b"1", b"\\ud800"),
    "huge protocol": _JOIN % (b"9" * 800, b"1", b"x"),
    "huge place": _JOIN % (b"1", b"9" * 800, b"x"),
    "negative place": _JOIN % (b"1", b"-1", b"x"),
    "NaN": _JOIN % (b"NaN", b"1", b"x"),
    "infinity": _JOIN % (b"1e999", b"1", b"x"),
}
DEEP = b'{"kind":"alive","x":' + b"[" * 100_000
HOSTILE_AFTER_JOIN = {
    "nested lists": DEEP,
    "invalid UTF-8": b'{"kind":"output","rank":0,"text":"\xff"}',
    "huge integer": b'{"kind":"output","rank":' + b"9" * 4000 + b',"text":""}',
    "NaN": b'{"kind":"waiting","words":NaN}',
    "unknown kind": b'{"kind":"explode"}',
}


def open_files() -> int:
    return psutil.Process().num_fds()


async def files_are_back_to(before: int) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while open_files() > before:
            await asyncio.sleep(0.01)


async def has_told(host: Host, count: int = 1) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while len(host.events) < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE)
def test_hostile_frame_before_the_token_closes_its_connection(
    frame: bytes, snapshot: SnapshotAssertion
) -> None:
    assert len(frame) <= JOIN_LIMIT

    async def story() -> None:
        async with open_host() as host:
            before = open_files()
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(framed(frame))
                await is_closed_on(reader)
            await has_told(host)
            (event,) = host.events
            assert event.endswith(" 127.0.0.1")
            assert event == snapshot
            await files_are_back_to(before)
            await proves_open(host)

    asyncio.run(story())


def test_200_nested_frames_hold_no_descriptor_and_keep_nobody_out() -> None:
    async def story() -> None:
        async with open_host() as host:
            before = open_files()

            async def attack() -> None:
                async with raw_connection(host, tls=True) as (reader, writer):
                    writer.write(framed(NESTED))
                    await is_closed_on(reader)

            for _ in range(10):
                await asyncio.gather(*(attack() for _ in range(20)))
            await files_are_back_to(before)
            assert host.service._reception is not None
            assert host.service._reception._greeting == {}
            assert len(host.events) == 1  # the rest is counted, and told later
            await proves_open(host)

    asyncio.run(story())


def test_any_error_while_a_stranger_is_heard_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    async def story() -> None:
        async with open_host() as host:
            before = open_files()
            with monkeypatch.context() as patch:
                patch.setattr(token_registry, "decode_join", broken)
                for _ in range(3):
                    async with raw_connection(host, tls=True) as (reader, writer):
                        writer.write(framed(b"{}"))
                        await is_closed_on(reader)
            await has_told(host)
            (event,) = host.events
            assert "MemoryError" in event
            assert event.endswith(" 127.0.0.1")
            assert event == snapshot
            await files_are_back_to(before)
            await proves_open(host)

    asyncio.run(story())


def test_error_after_a_place_was_given_frees_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError

    async def story() -> None:
        async with open_host() as host:
            before = open_files()
            code = host.service.codes()[1]
            with monkeypatch.context() as patch:
                patch.setattr(service, "Welcome", broken)
                async with raw_connection(host, tls=True) as (reader, writer):
                    writer.write(join_message(code))
                    await is_closed_on(reader)
            await asyncio.wait_for(host.arrivals.get(), GIVE_UP_S)
            assert (await asyncio.wait_for(host.new_codes.get(), GIVE_UP_S))[0] == 1
            await files_are_back_to(before)
            await proves_open(host)

    asyncio.run(story())


@pytest.mark.parametrize("frame", HOSTILE_AFTER_JOIN.values(), ids=HOSTILE_AFTER_JOIN)
def test_hostile_frame_of_a_joined_machine_loses_that_machine_alone(frame: bytes) -> None:
    async def story() -> None:
        async with open_host(count=2) as host:
            good = await join(host.service.codes()[2])
            _, other = await host.arrivals.get()
            before = open_files()
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(join_message(host.service.codes()[1]))
                _, channel = await host.arrivals.get()
                node = NodeHandle(1, "machine 2", channel, "0.1.0")
                changed = asyncio.Event()
                node.listen(on_output=lambda *_: None, on_change=changed.set)
                writer.write(framed(frame))
                await asyncio.wait_for(changed.wait(), GIVE_UP_S)
                assert node.lost
                assert len(node.lost) < 300
                await asyncio.wait_for(reader.read(), GIVE_UP_S)
                await node.close()
            assert (await asyncio.wait_for(host.new_codes.get(), GIVE_UP_S))[0] == 1
            await files_are_back_to(before)
            await other.send(protocol.Alive())
            assert await good.receive() == protocol.Alive()
            await proves_open(host)
            await good.close()

    asyncio.run(story())


@pytest.mark.parametrize("frame", HOSTILE_AFTER_JOIN.values(), ids=HOSTILE_AFTER_JOIN)
def test_hostile_frame_of_the_host_ends_the_connection(frame: bytes) -> None:
    async def story() -> None:
        async with open_host() as host:
            machine = await join(host.service.codes()[1])
            _, channel = await host.arrivals.get()
            await channel._stream.send(frame)  # type: ignore[attr-defined]
            with pytest.raises(protocol.UnreadableMessage):
                await machine.receive()
            assert await machine.receive() is None
            assert await asyncio.wait_for(channel.receive(), GIVE_UP_S) is None
            await machine.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    "frame", [DEEP, NESTED, b'{"kind":"welcome","protocol":%b}' % (b"9" * 800)]
)
def test_hostile_answer_of_a_host_is_no_answer(frame: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage):
        token_registry.decode_answer(frame)
