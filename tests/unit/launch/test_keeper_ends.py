"""A keeper ends what it started, whatever becomes of the launcher, and whenever."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from torchmuster.launch import wire
from torchmuster.launch.keeper import keeper as keeper_module
from torchmuster.launch.keeper import sweep
from torchmuster.launch.keeper.keeper import Keeper

_ENDED_WITHIN_S = 15.0


class FakeEnd:
    """The launcher's side, played by the test; ``deaf`` as one whose link was cut."""

    def __init__(self) -> None:
        self.to_keeper: asyncio.Queue[wire.ToKeeper | None] = asyncio.Queue()
        self.heard: list[wire.FromKeeper] = []
        self.deaf = False

    async def receive(self) -> wire.ToKeeper | None:
        return await self.to_keeper.get()

    async def send(self, message: wire.FromKeeper) -> None:
        if self.deaf:
            await asyncio.Event().wait()
        self.heard.append(message)

    async def close(self) -> None:
        pass

    def say(self, *messages: wire.ToKeeper | None) -> None:
        for message in messages:
            self.to_keeper.put_nowait(message)

    async def hear(self, kind: type[wire.Message]) -> wire.Message:
        async with asyncio.timeout(_ENDED_WITHIN_S):
            while True:
                for message in self.heard:
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.01)


class Scene:
    """A keeper that starts its ranks itself, which needs no torch, and a script for them."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "script.py").write_text(script)
        self.token = os.urandom(8).hex()
        self.prepare = wire.Prepare(
            run_id="r",
            token=self.token,
            command=("script.py",),
            module=False,
            folder=str(folder),
            device="cpu",
            ranks=1,
        )
        self.start = wire.Start(
            attempt=3,
            node_rank=0,
            nodes=1,
            first_rank=0,
            world_size=1,
            backend="muster",
            endpoint="127.0.0.1:1",
            address="127.0.0.1",
            port=1,
            local_address="127.0.0.1",
            interface=None,
            timeout_s=5,
            max_restarts=5,
        )
        self.end = FakeEnd()

    def play(self, scene: Callable[["Scene"], Awaitable[None]]) -> Keeper:
        async def go() -> Keeper:
            self.end = FakeEnd()
            keeper = Keeper(self.end, system="win32")
            keeping = asyncio.create_task(keeper.run())
            await scene(self)
            await asyncio.wait_for(keeping, _ENDED_WITHIN_S)
            return keeper

        keeper = asyncio.run(go())
        assert sweep.processes_of(self.token) == []
        return keeper


_FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


@pytest.mark.usefixtures("own_machine")
def test_a_request_to_stop_that_comes_with_the_start_is_not_lost(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(wire.Prepared)
        it.end.say(it.start, wire.Stop(grace_s=0.0, why=""))
        ended = await it.end.hear(wire.Ended)
        assert isinstance(ended, wire.Ended)
        assert ended.attempt == 3
        assert sweep.processes_of(it.token) == []
        it.end.say(wire.Leave(exit_code=0, words="over"))

    Scene(tmp_path, _FOREVER).play(scene)


@pytest.mark.usefixtures("own_machine")
def test_where_nothing_runs_that_is_the_answer(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(wire.Stop(grace_s=5.0, why=""))
        assert await it.end.hear(wire.Ended) == wire.Ended(attempt=-1, good=True)
        it.end.say(None)

    Scene(tmp_path, _FOREVER).play(scene)


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_goes_while_ranks_are_starting_leaves_none(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(wire.Prepared)
        it.end.say(it.start, None)

    keeper = Scene(tmp_path, _FOREVER).play(scene)
    assert keeper.words == "the launcher has gone"


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_takes_nothing_any_more_does_not_keep_the_keeper(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(wire.Prepared)
        it.end.say(it.start)
        await it.end.hear(wire.Output)
        it.end.deaf = True
        await asyncio.sleep(0.5)  # something is stuck on its way by now
        it.end.say(None)

    flood = "while True:\n    print('x' * 1000, flush=True)\n"
    began = time.monotonic()
    Scene(tmp_path, flood).play(scene)
    assert time.monotonic() - began < 8


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_never_says_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_SILENT_AT_FIRST_S", 0.5)

    async def scene(it: Scene) -> None:
        await it.end.hear(wire.Hello)

    keeper = Scene(tmp_path, _FOREVER).play(scene)
    assert "the launcher was not heard" in keeper.words


@pytest.mark.usefixtures("own_machine")
def test_a_keeper_that_cannot_go_on_watching_says_so_and_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("the disk has gone")

    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(wire.Prepared)
        monkeypatch.setattr("torchmuster.launch.keeper.tails.Tail.read", broken)
        it.end.say(it.start)
        ended = await it.end.hear(wire.Ended)
        assert isinstance(ended, wire.Ended)
        assert not ended.good
        assert ended.words == "the keeper failed: OSError: the disk has gone"
        assert sweep.processes_of(it.token) == []
        it.end.say(wire.Leave(exit_code=1, words="over"))

    Scene(tmp_path, _FOREVER).play(scene)
