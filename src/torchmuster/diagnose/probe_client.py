"""Requests to a probe program (``host_probe.py``), one at a time, whatever carries its lines."""

import asyncio
import itertools
from typing import Any, TypeVar

import msgspec

from torchmuster.errors import MachineLost, MusterError

HOST_PROBE = "torchmuster.diagnose.host_probe"

Answer = TypeVar("Answer")


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The error that a probe program sends instead of an answer."""

    what: str
    why: str = ""
    fix: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a probe program: the answer to the request with this number, or its error."""

    id: int
    answer: Any = None
    error: Refusal | None = None


class ProbeClient:
    """Sends requests to the probe program of one host. Subclasses carry the lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbers = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()

    async def send_line(self, line: str) -> None:
        """Send a line to the program; ignored if it has ended."""
        raise NotImplementedError

    async def receive_line(self) -> str:
        """Return the next line of the program; raise ``MachineLost`` if it has ended."""
        raise NotImplementedError

    async def ask(self, verb: str, argument: Any, kind: type[Answer], *, within_s: float) -> Answer:
        """Return the answer as this type; raise the error that the host sends instead, or a timeout."""
        number = next(self._numbers)
        request = msgspec.json.encode({"id": number, "verb": verb, "argument": argument})
        try:
            async with asyncio.timeout(within_s), self._one_at_a_time:
                await self.send_line(request.decode())
                reply = await self._receive_reply(number)
        except TimeoutError:
            raise MusterError(
                f"{self.name} did not answer within {within_s:g} s",
                why=f"the request was {verb!r}; the host is overloaded, or a process on it hangs",
            ) from None
        if reply.error is not None:
            error = reply.error
            raise MusterError(f"{self.name}: {error.what}", why=error.why, fix=error.fix)
        try:
            return msgspec.convert(reply.answer, kind)
        except msgspec.ValidationError as error:
            raise MusterError(f"{self.name} sent an unreadable answer", why=str(error)) from error

    async def _receive_reply(self, number: int) -> Reply:
        """Return the reply with this number; one that comes too late has another number."""
        while True:
            line = await self.receive_line()
            try:
                reply = msgspec.json.decode(line, type=Reply)
            except (msgspec.MsgspecError, RecursionError):  # not a reply
                continue
            if reply.id == number:
                return reply

    def lost(self, why: str) -> MachineLost:
        """Return the error for a program that has ended."""
        return MachineLost(f"{self.name} lost its probe program", why=why)
