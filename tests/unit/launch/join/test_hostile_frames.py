"""Frames that break a decoder close their own connection, free what it held, and nothing else."""

import asyncio

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.launcher.node_handle import NodeHandle
from torchmuster.launch.transports.join import messages
from torchmuster.launch.transports.join.messages import JOIN_LIMIT
from unit.launch.join.open_host import join, open_host, proves_open
from unit.launch.join.test_attacks import framed, is_closed_on, join_message, raw_connection

pytestmark = pytest.mark.usefixtures("time_enough")

# Deeper than Python's recursion limit, within the size that a stranger may send.
NESTED = b'{"kind":"join","x":' + b"[" * 1000
_JOIN = (
    b'{"kind":"join","protocol":%b,"place":%b,"secret":"AAAAAAAAAAAAAAAAAAAAAA==",'
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


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE)
def test_hostile_frame_before_the_secret_closes_its_connection(frame: bytes) -> None:
    assert len(frame) <= JOIN_LIMIT

    async def story() -> None:
        async with open_host() as host:
            before = open_files()
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(framed(frame))
                await is_closed_on(reader)
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
            assert host.service._unproven == set()
            await proves_open(host)

    asyncio.run(story())


def test_any_error_while_a_stranger_is_heard_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    async def story() -> None:
        async with open_host() as host:
            before = open_files()
            with monkeypatch.context() as patch:
                patch.setattr(messages, "decode_join", broken)
                for _ in range(3):
                    async with raw_connection(host, tls=True) as (reader, writer):
                        writer.write(framed(b"{}"))
                        await is_closed_on(reader)
            await files_are_back_to(before)
            await proves_open(host)

    asyncio.run(story())


@pytest.mark.parametrize("frame", HOSTILE_AFTER_JOIN.values(), ids=HOSTILE_AFTER_JOIN)
def test_hostile_frame_of_a_joined_machine_loses_that_machine_alone(frame: bytes) -> None:
    async def story() -> None:
        async with open_host(count=2) as host:
            good = await join(host.service.code)
            _, other = await host.arrivals.get()
            before = open_files()
            async with raw_connection(host, tls=True) as (reader, writer):
                writer.write(join_message(host.service.code))
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
            machine = await join(host.service.code)
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
        messages.decode_answer(frame)
