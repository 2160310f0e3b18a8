"""A program beside the node agent: only ours, heard line by line, and never left behind."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.node import process_cleanup
from torchmuster.launch.node import sidecar as sidecar_module
from torchmuster.launch.node.node_agent import NodeAgent
from torchmuster.launch.node.sidecar import Sidecar

pytestmark = pytest.mark.usefixtures("patient_agent")


class Launcher:
    """The launcher's side of a node agent, played by the test."""

    def __init__(self) -> None:
        self.to_agent: asyncio.Queue[protocol.ToAgent | None] = asyncio.Queue()
        self.heard: asyncio.Queue[protocol.FromAgent] = asyncio.Queue()

    async def receive(self) -> protocol.ToAgent | None:
        return await self.to_agent.get()

    async def send(self, message: protocol.FromAgent) -> None:
        self.heard.put_nowait(message)

    async def close(self) -> None:
        pass

    async def hear(self, kind: type[protocol.Message]) -> protocol.Message:
        async with asyncio.timeout(GIVE_UP_S):
            while not isinstance(message := await self.heard.get(), kind):
                pass
        return message


def pids_of(token: str) -> list[int]:
    return [process.pid for process in process_cleanup.processes_of(token)]


def question(number: int, verb: str) -> protocol.Relay:
    return protocol.Relay(text=json.dumps({"id": number, "verb": verb, "argument": None}))


def play(scene: Callable[[Launcher, str], Awaitable[None]]) -> None:
    """Play a scene with a node agent; at its end nothing of it may be alive."""
    token = os.urandom(8).hex()

    async def go() -> None:
        launcher = Launcher()
        keeping = asyncio.create_task(NodeAgent(launcher).run())
        await launcher.hear(protocol.Hello)
        await scene(launcher, token)
        launcher.to_agent.put_nowait(None)
        await asyncio.wait_for(keeping, GIVE_UP_S)

    asyncio.run(go())
    assert process_cleanup.processes_of(token) == []


@pytest.mark.usefixtures("own_machine")
def test_a_program_is_started_talked_with_and_ended_with_the_agent() -> None:
    async def scene(launcher: Launcher, token: str) -> None:
        launcher.to_agent.put_nowait(protocol.Relay(token=token))
        await launcher.hear(protocol.Done)
        launcher.to_agent.put_nowait(question(7, "no-such-verb"))
        relayed = await launcher.hear(protocol.Relay)
        assert isinstance(relayed, protocol.Relay)
        answer = json.loads(relayed.text)
        assert answer["id"] == 7
        assert "'no-such-verb'" in answer["error"]["what"]
        assert len(pids_of(token)) == 1

    play(scene)


@pytest.mark.usefixtures("own_machine")
def test_the_end_of_a_program_is_told_with_how_and_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sidecar_module, "_PROGRAM", "torchmuster.no_such")

    async def scene(launcher: Launcher, token: str) -> None:
        launcher.to_agent.put_nowait(protocol.Relay(token=token))
        ended = await launcher.hear(protocol.Relay)
        assert isinstance(ended, protocol.Relay)
        assert ended.exit_code == 1
        assert "torchmuster.no_such" in ended.text

    play(scene)


@pytest.mark.usefixtures("own_machine")
def test_a_program_that_was_killed_is_told_by_its_signal() -> None:
    async def scene(launcher: Launcher, token: str) -> None:
        launcher.to_agent.put_nowait(protocol.Relay(token=token))
        await launcher.hear(protocol.Done)
        (pid,) = pids_of(token)
        os.kill(pid, signal.SIGKILL)
        last = await launcher.hear(protocol.Relay)
        assert last == protocol.Relay(text="", is_last=True, exit_code=-9)

    play(scene)


@pytest.mark.usefixtures("own_machine")
def test_ranks_that_are_swept_away_leave_the_program_where_it_is() -> None:
    async def scene(launcher: Launcher, token: str) -> None:
        launcher.to_agent.put_nowait(protocol.Relay(token=token))
        await launcher.hear(protocol.Done)
        process_cleanup.kill_processes(f"{token}.ranks", within_s=1.0)
        launcher.to_agent.put_nowait(question(1, "no-such-verb"))
        await launcher.hear(protocol.Relay)

    play(scene)


def test_a_program_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    async def play_it() -> None:
        async def send(message: protocol.FromAgent) -> None:
            raise AssertionError(message)

        sidecar = await Sidecar.begin(os.urandom(8).hex(), tmp_path, send)
        os.kill(sidecar.pid, signal.SIGSTOP)
        async with asyncio.timeout(GIVE_UP_S):
            await sidecar.end()
        assert not psutil.pid_exists(sidecar.pid)

    asyncio.run(play_it())
