import asyncio
from collections.abc import Awaitable, Callable

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import MachineLost
from torchmuster.launch import protocol
from torchmuster.launch.launcher.host import ConnectedHost


class FakeChannel:
    """A machine that says what the test lets it say."""

    def __init__(self) -> None:
        self.sent: list[protocol.ToAgent] = []
        self.says: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self.drained = asyncio.Event()
        self.closed = False

    async def send(self, message: protocol.ToAgent) -> None:
        self.sent.append(message)

    async def receive(self) -> protocol.FromAgent | None:
        message = await self.says.get()
        if self.says.empty():
            self.drained.set()
        return message

    def say_alive(self) -> None:
        pass

    def why_closed(self) -> str:
        return ""

    async def close(self) -> None:
        """End only once all that was said has been heard, as a process with a full pipe does."""
        self.closed = True
        await asyncio.wait_for(self.drained.wait(), GIVE_UP_S)


_START = protocol.Start(
    attempt=1,
    node_rank=0,
    nodes=1,
    first_rank=0,
    world_size=1,
    address="",
    port=1,
    interface=None,
    max_restarts=1,
)


def with_node(scene: Callable[[ConnectedHost, FakeChannel], Awaitable[None]]) -> None:
    """Play a scene with a machine that is listened to."""

    async def play() -> None:
        channel = FakeChannel()
        node = ConnectedHost(0, "node1", channel, "token.0.0")
        node.listen()
        try:
            await scene(node, channel)
        finally:
            channel.says.put_nowait(None)
            await node.close()

    asyncio.run(play())


async def said(channel: FakeChannel, *messages: protocol.FromAgent) -> None:
    """Let the machine say something, and wait until it has been taken in."""
    for message in messages:
        channel.says.put_nowait(message)
    while not channel.says.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_only_the_first_end_of_this_attempt_counts() -> None:
    async def scene(node: ConnectedHost, channel: FakeChannel) -> None:
        node.expect(1)
        starting = asyncio.ensure_future(node.ask(_START, protocol.Done, within_s=GIVE_UP_S))
        await said(channel, protocol.Ended(attempt=0, good=True), protocol.Done())
        await starting
        assert not node.ended
        failed = protocol.Ended(attempt=1, good=False, text="out of memory")
        # To a late request to stop it answers that nothing runs any more.
        await said(channel, failed, protocol.Ended(attempt=1, good=True))
        assert node.ended == failed

    with_node(scene)


def test_answers_from_an_earlier_attempt_are_forgotten() -> None:
    async def scene(node: ConnectedHost, channel: FakeChannel) -> None:
        node.expect(0)
        await said(channel, protocol.Listening(port=1, addresses=(), reason="old"))
        node.expect(1)
        hearing = asyncio.ensure_future(node.hear(protocol.Listening, within_s=GIVE_UP_S))
        await said(channel, protocol.Listening(port=2, addresses=(), reason="new"))
        assert (await hearing).port == 2

    with_node(scene)


def test_a_machine_that_does_not_answer_in_time_is_lost() -> None:
    async def scene(node: ConnectedHost, channel: FakeChannel) -> None:
        with pytest.raises(MachineLost, match="node1 does not answer"):
            await node.hear(protocol.Listening, within_s=0)
        assert node.why_lost == "no answer within 0 s"

    with_node(scene)


def test_a_machine_that_still_talks_can_be_let_go_of() -> None:
    async def scene(node: ConnectedHost, channel: FakeChannel) -> None:
        for _ in range(1000):
            channel.says.put_nowait(protocol.Output(rank=0, text="still here\n"))

    with_node(scene)


def test_machine_whose_message_cannot_be_handled_is_lost_and_its_channel_closed(
    snapshot: SnapshotAssertion,
) -> None:
    def broken(host: ConnectedHost, message: protocol.FromAgent) -> None:
        raise RecursionError("too deep")

    async def play() -> None:
        channel = FakeChannel()
        changed = asyncio.Event()
        node = ConnectedHost(
            0, "node1", channel, "token.0.0", on_message=broken, on_change=changed.set
        )
        node.listen()
        await said(channel, protocol.Output(rank=0, text="x"))
        await asyncio.wait_for(changed.wait(), GIVE_UP_S)
        assert str(node.why_lost).endswith(": RecursionError: too deep")
        assert node.why_lost == snapshot
        with pytest.raises(MachineLost):
            await node.hear(protocol.Listening, within_s=GIVE_UP_S)
        while not channel.closed:
            await asyncio.sleep(0)
        channel.says.put_nowait(None)
        await node.close()

    asyncio.run(play())
