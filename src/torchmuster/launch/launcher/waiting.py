"""Wait for the hosts of a run: until something changes, or until a stop is requested."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

# Seconds until the first message while waiting, and between later ones.
FIRST_MESSAGE_S, NEXT_MESSAGE_S = 5.0, 9.0

T = TypeVar("T")


class Stopped(Exception):
    """A stop was requested."""


class Waiting:
    """Wait for changes or a stop request, and report what is being waited for."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Request a stop."""
        self._stop.set()
        self._changed.set()

    def change(self) -> None:
        """Wake up waiters because something changed."""
        self._changed.set()

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """Wait for ``work``; raise `Stopped` if a stop is requested first."""
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
        """Wait for a change, at most ``within_s``; raise `Stopped` if a stop was requested."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)
        self._changed.clear()
        if self.stopped and not although_stopped:
            raise Stopped

    @contextlib.asynccontextmanager
    async def reporting(self, describe: Callable[[], str]) -> AsyncIterator[None]:
        """Print every few seconds what is being waited for."""

        async def report() -> None:
            await asyncio.sleep(FIRST_MESSAGE_S)
            while True:
                text = describe()
                if text:
                    logger.info(text)
                await asyncio.sleep(NEXT_MESSAGE_S)

        task = asyncio.create_task(report())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class BackgroundTasks:
    """Work beside the flow of a run; an error in it is logged, and does not end the run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()  # the event loop keeps only weak references

    def start(self, work: Awaitable[None]) -> None:
        """Start work, which is cancelled by ``close``."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    async def close(self) -> None:
        """Cancel what is not done."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.info(f"a message or a connection failed: {task.exception()}")
