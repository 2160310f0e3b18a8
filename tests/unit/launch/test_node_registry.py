"""Who is called comes, is refused, or is let go of in a bounded time and called again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MachineLost
from torchmuster.launch import protocol
from torchmuster.launch.launcher import node_handle, node_registry
from torchmuster.launch.launcher.node_handle import Stopped, WaitingMessages
from torchmuster.launch.launcher.node_registry import NodeRegistry
from torchmuster.launch.transports.channel import Arrive

RECORD = protocol.NodeRecord(
    host="n",
    user="ana",
    pid=1,
    system="linux",
    machine="x86_64",
    python="3.11.7",
    torch="2.13.0",
    torchmuster="0",
    cores=8,
    clock_unix_s=0.0,
    addresses=(),
)


class Machine:
    """A channel to a machine that says hello and is let go of as the test wants it."""

    def __init__(
        self, letting_go: Callable[[], Awaitable[object]], *, version: int = protocol.PROTOCOL
    ) -> None:
        self._letting_go = letting_go
        self._says: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self._says.put_nowait(protocol.Hello(protocol=version, record=RECORD))
        self.given_up = False

    async def send(self, message: protocol.ToAgent) -> None:
        pass

    async def receive(self) -> protocol.FromAgent | None:
        return await self._says.get()

    def why_closed(self) -> str:
        return ""

    async def close(self) -> None:
        try:
            await self._letting_go()
        except asyncio.CancelledError:
            self.given_up = True
            raise


async def at_once() -> None:
    pass


async def never() -> None:
    await asyncio.Event().wait()


class Called:
    """A transport of three machines; those that are called again let go at once."""

    def __init__(self, letting_go: Callable[[], Awaitable[object]]) -> None:
        self.machines = [Machine(letting_go) for _ in range(3)]
        self.again: list[int] = []
        self._arrive: Arrive

    @property
    def places(self) -> Sequence[str]:
        return ["a", "b", "c"]

    async def open(self, arrive: Arrive) -> None:
        self._arrive = arrive
        for place, machine in enumerate(self.machines):
            arrive(place, machine)

    async def reopen(self, place: int) -> None:
        self.again.append(place)
        self._arrive(place, Machine(at_once))

    def waiting_for(self, place: int) -> str:
        return "it is called"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        return None

    def rejoins(self, place: int) -> bool:
        return True

    async def close(self) -> None:
        pass


Scene = Callable[[NodeRegistry, Called, WaitingMessages], Awaitable[None]]


def play(letting_go: Callable[[], Awaitable[object]], scene: Scene, said: list[str]) -> None:
    """Play a scene with three machines that are all lost."""

    async def story() -> None:
        patience = WaitingMessages(said.append)
        called = Called(letting_go)
        registry = NodeRegistry(
            called,
            patience,
            token="t",
            join_s=GIVE_UP_S,
            lost_after_s=None,
            on_output=lambda *_: None,
        )
        await called.open(registry.arrive)
        await registry.call(range(3))
        for node in registry.nodes:
            node.lose("the link is cut")
        try:
            await scene(registry, called, patience)
        finally:
            await registry.close()
            await asyncio.gather(*(node.close() for node in registry.nodes if not node.lost))

    asyncio.run(story())


def test_a_host_that_is_lost_while_others_are_awaited_ends_the_wait() -> None:
    class Once(Called):
        def rejoins(self, place: int) -> bool:
            return False

    async def story() -> None:
        called = Once(at_once)
        called.machines[1]._says.put_nowait(None)  # it has joined, and is lost
        called.machines[2]._says = asyncio.Queue()  # it never joins
        registry = NodeRegistry(
            called,
            WaitingMessages(lambda _: None),
            token="t",
            join_s=2 * GIVE_UP_S,
            lost_after_s=None,
            on_output=lambda *_: None,
        )
        await called.open(registry.arrive)
        try:
            with pytest.raises(MachineLost, match="b is lost"):
                await asyncio.wait_for(registry.call(range(3)), GIVE_UP_S)
        finally:
            await registry.close()

    asyncio.run(story())


def test_the_lost_are_let_go_of_at_the_same_time() -> None:
    together = asyncio.Barrier(3)

    async def scene(registry: NodeRegistry, called: Called, _: WaitingMessages) -> None:
        back = await asyncio.wait_for(registry.call_back_the_lost(), GIVE_UP_S)
        assert [node.place for node in back] == sorted(called.again) == [0, 1, 2]
        assert not any(node.lost for node in back)
        assert not any(machine.given_up for machine in called.machines)

    play(together.wait, scene, [])


def test_a_lost_machine_that_cannot_be_let_go_of_does_not_hold_up_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_registry, "_LET_GO_WITHIN_S", 0.3)
    monkeypatch.setattr(node_handle, "FIRST_WORD_S", 0.1)
    said: list[str] = []

    async def scene(registry: NodeRegistry, called: Called, _: WaitingMessages) -> None:
        await registry.call_back_the_lost()
        assert all(machine.given_up for machine in called.machines)

    play(never, scene, said)
    # On a busy machine, more is said: who has come when they were called.
    assert any("a, b and c" in words for words in said)


def test_nobody_who_wants_the_end_has_to_wait_for_the_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_registry, "_LET_GO_WITHIN_S", 10 * GIVE_UP_S)
    begun = asyncio.Event()

    async def never_ends() -> None:
        begun.set()
        await never()

    async def scene(registry: NodeRegistry, called: Called, patience: WaitingMessages) -> None:
        calling = asyncio.create_task(registry.call_back_the_lost())
        await begun.wait()
        patience.stop()
        with pytest.raises(Stopped):
            await calling
        assert called.again == []

    play(never_ends, scene, [])


def test_a_machine_that_came_back_by_itself_is_kept() -> None:
    came: list[Machine] = []

    async def scene(registry: NodeRegistry, called: Called, _: WaitingMessages) -> None:
        async def comes_back() -> None:
            came.append(Machine(at_once))
            registry.arrive(1, came[0])

        called.machines[1]._letting_go = comes_back
        back = await asyncio.wait_for(registry.call_back_the_lost(), GIVE_UP_S)
        assert back[1].channel is came[0]
        assert sorted(called.again) == [0, 2]

    play(at_once, scene, [])


def test_a_machine_of_another_protocol_is_refused_although_it_is_the_last_to_come() -> None:
    async def story() -> None:
        called = Called(at_once)
        called.machines[2] = Machine(at_once, version=protocol.PROTOCOL + 97)
        registry = NodeRegistry(
            called,
            WaitingMessages(print),
            token="t",
            join_s=GIVE_UP_S,
            lost_after_s=None,
            on_output=lambda *_: None,
        )
        await called.open(registry.arrive)
        try:
            with pytest.raises(Impossible, match=r"torchmuster on c uses protocol 99"):
                await registry.call(range(3))
        finally:
            await registry.close()
            for node in registry.nodes:
                await node.close()

    asyncio.run(story())


def test_whoever_does_not_come_back_is_left_out_where_the_others_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_registry, "_CALL_LEFT_OUT_AFTER_S", 0.1)

    async def story() -> None:
        called = Away()
        registry = NodeRegistry(
            called,
            WaitingMessages(print),
            token="t",
            join_s=GIVE_UP_S,
            lost_after_s=None,
            on_output=lambda *_: None,
            enough=2,
            return_s=0.5,
        )
        await called.open(registry.arrive)
        await registry.call(range(3))
        for node in registry.nodes:
            node.prepared = PREPARED
        registry.nodes[1].lose("its power is cut")
        assert await registry.call_back_the_lost() == []
        assert [node.name for node in registry.nodes] == ["a", "c"]
        assert (registry.left_out, registry.newcomers) == (["b"], [])
        called.is_up = True
        async with asyncio.timeout(GIVE_UP_S):
            while not registry.newcomers:
                await asyncio.sleep(0.05)
        assert [node.name for node in registry.nodes] == ["a", "c"]  # until it is taken in
        (back,) = await registry.call_back_the_lost()
        assert (back.name, registry.left_out) == ("b", [])
        assert [node.name for node in registry.nodes] == ["a", "b", "c"]
        await registry.leave(0, "")

    asyncio.run(story())


PREPARED = protocol.Prepared(ranks=1, devices=("CPU",), reasons=(), fingerprint=None)
AWAY = protocol.Trouble(name="host-unreachable", what="cannot connect to host b", why="it is off")


class Away(Called):
    """A transport whose second machine, once it was lost, is off until it is up again."""

    def __init__(self) -> None:
        super().__init__(at_once)
        self.is_up = False
        self._trouble: protocol.Trouble | None = None

    async def reopen(self, place: int) -> None:
        self._trouble = None if self.is_up else AWAY
        if self.is_up:
            await super().reopen(place)

    def gave_up(self, place: int) -> protocol.Trouble | None:
        return self._trouble if place == 1 else None
