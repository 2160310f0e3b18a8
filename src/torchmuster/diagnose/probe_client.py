"""Requests to a probe program (``host_probe.py``), whatever carries its lines."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from torchmuster.errors import MachineLost, MusterError

HOST_PROBE = "torchmuster.diagnose.host_probe"


class ProbeClient:
    """Sends requests to the probe program of one host; handles several in parallel."""

    def __init__(self, name: str, send: Callable[[str], Awaitable[None]]) -> None:
        self.name = name
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._gone = ""

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        """Return the answer; raise the error that the host sends instead, or a timeout."""
        if self._gone:
            raise self._lost()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        line = json.dumps({"id": number, "verb": verb, "argument": argument})
        try:
            async with asyncio.timeout(within_s):
                await self._send(line)
                return await answer
        except TimeoutError:
            raise MusterError(
                f"{self.name} did not answer within {within_s:g} s",
                why=f"the request was {verb!r}; the host is overloaded, or a process on it hangs",
            ) from None
        finally:
            self._waiting.pop(number, None)

    def hear(self, line: str) -> None:
        """Process a line of the probe program."""
        try:
            reply = json.loads(line)
            answer = self._waiting[reply["id"]]
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # the caller has given up, or it is not an answer
            return
        if answer.done():
            return
        if "error" in reply:
            answer.set_exception(self._error(reply["error"]))
        else:
            answer.set_result(reply.get("answer"))

    def end(self, why: str) -> None:
        """Fail all open and later requests: the probe program is gone."""
        self._gone = why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost())

    def _error(self, content: Any) -> MusterError:
        parts = content if isinstance(content, dict) else {}
        what, why, fix = (str(parts.get(name, "")) for name in ("what", "why", "fix"))
        return MusterError(f"{self.name}: {what or content}", why=why, fix=fix)

    def _lost(self) -> MachineLost:
        return MachineLost(f"{self.name} lost its probe program", why=self._gone)
