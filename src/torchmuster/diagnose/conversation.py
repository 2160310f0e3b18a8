"""The launcher's end of a conversation with the examiner on a machine."""

import asyncio
import itertools
import json
from typing import Any

from torchmuster.errors import MachineLost, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.launcher.node_handle import Node, Word

PROGRAM = "torchmuster.diagnose.examiner"
_START_WITHIN_S = 20.0
_WORDS_SHOWN = 4


class Examiner:
    """The examiner on one machine: asked things by name, many at a time if need be."""

    def __init__(self, node: Node) -> None:
        assert node.record is not None
        self.name = node.name
        self.place = node.place
        self.record = node.record
        self._node = node
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._gone = ""

    @classmethod
    async def engage(cls, node: Node) -> "Examiner":
        """Have the program started on a machine that answered the roll-call."""
        examiner = cls(node)
        await node.engage(PROGRAM, examiner._hear, within_s=_START_WITHIN_S)
        return examiner

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        """Return the answer; raises what the machine answers with instead, or that it does not."""
        if self._gone:
            raise self._lost()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        line = json.dumps({"id": number, "verb": verb, "argument": argument})
        try:
            async with asyncio.timeout(within_s):
                await self._node.channel.send(protocol.Relay(text=line))
                return await answer
        except TimeoutError:
            raise MusterError(
                f"{self.name} did not answer within {within_s:g} s",
                why=f"it was asked to {verb}; the machine is overloaded, or something in it hangs",
            ) from None
        finally:
            self._asked.pop(number, None)

    def _hear(self, word: Word) -> None:
        if isinstance(word, protocol.Disengaged):
            self._gone = _end(word)
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(self._lost())
            return
        try:
            said = json.loads(word.text)
            answer = self._asked[said["id"]]
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # given up by whoever asked, or not an answer
            return
        if answer.done():
            return
        if "error" in said:
            answer.set_exception(self._error(said["error"]))
        else:
            answer.set_result(said.get("answer"))

    def _error(self, told: Any) -> MusterError:
        parts = told if isinstance(told, dict) else {}
        what, why, fix = (str(parts.get(name, "")) for name in ("what", "why", "fix"))
        return MusterError(f"{self.name}: {what or told}", why=why, fix=fix)

    def _lost(self) -> MachineLost:
        return MachineLost(f"{self.name} cannot be examined any more", why=self._gone)


def _end(word: protocol.Disengaged) -> str:
    """Say how an examiner ended."""
    words = "\n".join(word.words.strip().splitlines()[-_WORDS_SHOWN:])
    if word.exit_code is None:
        return words or "its keeper is lost"
    how = f"by signal {-word.exit_code}" if word.exit_code < 0 else f"with code {word.exit_code}"
    return f"the program that examines it ended {how}\n{words}".strip()
