"""How the launcher waits: never longer than somebody wants the run, never without saying for whom."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# While something is being waited for, somebody is told at least this often.
FIRST_WORD_S, NEXT_WORD_S = 5.0, 9.0


class Stopped(Exception):
    """Somebody asked for the end."""


class Waiting:
    """What is waited on: something new, or the wish that it should end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for the end."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask for the end."""
        self._stop.set()
        self._changed.set()

    def change(self) -> None:
        """Something is new."""
        self._changed.set()

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """Wait for something; raises `Stopped` if it is no longer wanted."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def something_new(self, within_s: float, *, although_stopped: bool = False) -> None:
        """Wait until something is new, or the time is up; raises `Stopped` if it is not wanted."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)
        self._changed.clear()
        if self.stopped and not although_stopped:
            raise Stopped

    @contextlib.asynccontextmanager
    async def telling(self, words: Callable[[], str]) -> AsyncIterator[None]:
        """Say every few seconds what is being waited for."""

        async def tell() -> None:
            await asyncio.sleep(FIRST_WORD_S)
            while True:
                if text := words():
                    self._say(text)
                await asyncio.sleep(NEXT_WORD_S)

        task = asyncio.create_task(tell())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
