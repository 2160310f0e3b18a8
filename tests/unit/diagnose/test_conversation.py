"""Asking an examiner: answers find their question, and whoever asks is never left waiting."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.diagnose.probing import HostProbe
from torchmuster.errors import MachineLost, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.launcher.host import ConnectedHost

RECORD = protocol.NodeRecord(
    host="n1",
    system="linux",
    python="3.11.7",
    torch=None,
    torchmuster="0",
    cores=8,
    clock_unix_s=0.0,
    addresses=(),
)


class Machine:
    """A channel to a node agent that starts what it is told to; its examiner is played by the test."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self.asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.engaged: list[protocol.Relay] = []

    async def send(self, message: protocol.ToAgent) -> None:
        if not isinstance(message, protocol.Relay):
            return
        if message.token is not None:
            self.engaged.append(message)
            self.says.put_nowait(protocol.Done())
        else:
            self.asked.put_nowait(json.loads(message.text))

    async def receive(self) -> protocol.FromAgent | None:
        return await self.says.get()

    def say_alive(self) -> None:
        pass

    def why_closed(self) -> str:
        return "Connection reset by peer"

    async def close(self) -> None:
        pass

    def answer(self, **told: Any) -> None:
        self.says.put_nowait(protocol.Relay(text=json.dumps(told)))


def play(scene: Callable[[HostProbe, Machine], Awaitable[None]]) -> Machine:
    async def go() -> Machine:
        machine = Machine()
        node = ConnectedHost(0, "node1", machine, "token.0.0")
        node.record = RECORD
        node.listen()
        try:
            await scene(await HostProbe.engage(node), machine)
        finally:
            machine.says.put_nowait(None)
            await node.close()
        return machine

    return asyncio.run(go())


def test_an_error_there_is_raised_here_with_the_name_of_the_machine() -> None:
    async def scene(examiner: HostProbe, machine: Machine) -> None:
        asking = asyncio.ensure_future(examiner.ask("open", None, str, within_s=GIVE_UP_S))
        number = (await machine.asked.get())["id"]
        machine.answer(id=number, error={"what": "no port", "why": "taken", "fix": "--port 1"})
        with pytest.raises(MusterError) as caught:
            await asking
        assert str(caught.value) == "node1: no port\ntaken\n--port 1"

    play(scene)


def test_whoever_does_not_answer_in_time_is_named() -> None:
    async def scene(examiner: HostProbe, machine: Machine) -> None:
        with pytest.raises(MusterError) as caught:
            await examiner.ask("examine", None, str, within_s=0.05)
        assert caught.value.what.startswith("node1 ")
        assert "0.05 s" in caught.value.what
        assert "examine" in caught.value.why
        # What comes too late is not mistaken for another answer.
        machine.answer(id=(await machine.asked.get())["id"], answer="late")
        asking = asyncio.ensure_future(examiner.ask("examine", None, str, within_s=GIVE_UP_S))
        machine.answer(id=(await machine.asked.get())["id"], answer="in time")
        assert await asking == "in time"

    play(scene)


def test_when_the_machine_is_lost_all_questions_end() -> None:
    async def scene(examiner: HostProbe, machine: Machine) -> None:
        asking = asyncio.ensure_future(examiner.ask("dial", None, str, within_s=60))
        await machine.asked.get()
        machine.says.put_nowait(None)
        with pytest.raises(MachineLost) as caught:
            await asking
        assert caught.value.why == "Connection reset by peer"

    play(scene)


def test_an_answer_of_another_type_is_refused() -> None:
    async def scene(examiner: HostProbe, machine: Machine) -> None:
        asking = asyncio.ensure_future(examiner.ask("dial", None, list[int], within_s=GIVE_UP_S))
        number = (await machine.asked.get())["id"]
        machine.says.put_nowait(protocol.Relay(text="[" * 100_000))
        machine.answer(id=number, answer=["seven"])
        with pytest.raises(MusterError, match="unreadable answer"):
            await asking

    play(scene)
