"""One host of a run as the launcher sees it: its channel, its messages and its state."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from torchmuster.errors import Impossible, MachineLost, MusterError, NotNow
from torchmuster.launch import protocol
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.transports.channel import Channel

logger = logging.getLogger(__name__)
# Seconds until the first message while waiting, and between later ones.
FIRST_WORD_S, NEXT_WORD_S = 5.0, 9.0

T = TypeVar("T")
Reply = TypeVar("Reply", bound=protocol.Message)
# Output of a sidecar process, and finally how it exited.
Word = protocol.Relay | protocol.SidecarEnded
# Reports of what a host's ranks are doing, unsolicited and requested.
Sign = protocol.Heartbeats | protocol.Evidence | protocol.StackDump


class NodeHandle:
    """A host that connected."""

    def __init__(self, place: int, name: str, channel: Channel, part: str) -> None:
        self.place = place
        self.name = name
        self.channel = channel
        self.part = part  # the token of the processes that this node agent starts
        self.record: protocol.NodeRecord | None = None
        self.prepared: protocol.Prepared | None = None
        self.clock_offset_s = 0.0
        self.ended: protocol.Ended | None = None
        self.ended_s = 0.0
        self.lost = ""  # why it is lost; "" if it is not
        self.lost_s = 0.0
        self.heard_s = time.monotonic()
        self.heartbeats: tuple[Heartbeat, ...] = ()  # the newest of its ranks
        self.stopping: protocol.Stopping | None = None  # as last reported, at stopping_s
        self.stopping_s = 0.0
        self._attempt = -1
        self._replies: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self._on_change: Callable[[], None] = lambda: None
        self._on_word: Callable[[Word], None] = lambda _: None
        self._on_sign: Callable[[Sign], None] = lambda _: None
        self._on_metrics: Callable[[protocol.TrainingMetrics], None] = lambda _: None
        self._tasks: list[asyncio.Task[None]] = []
        self._sign: asyncio.Task[None] | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has joined and is not lost."""
        return self.record is not None and not self.lost

    @property
    def has_gpus(self) -> bool:
        """Whether its ranks use GPUs; False until it is prepared."""
        return self.prepared is not None and self.prepared.devices != ("CPU",)

    def listen(
        self, *, on_output: Callable[[int, str], None], on_change: Callable[[], None]
    ) -> None:
        """Start receiving the host's messages."""
        self._on_change = on_change
        self._tasks = [asyncio.create_task(self._take_in(on_output))]

    def say_alive(self) -> None:
        """Send the host a heartbeat, unless the last one is still being sent."""
        if self.lost:
            return
        at_once = getattr(self.channel, "say_alive", None)  # a network connection needs no task
        if at_once is not None and at_once():
            return
        if self._sign is None or self._sign.done():
            self._sign = asyncio.create_task(self.channel.send(protocol.Alive()))

    def notice_silence(self, lost_after_s: float) -> None:
        """Declare the host lost if it was silent for too long."""
        silent_s = time.monotonic() - self.heard_s
        if silent_s > lost_after_s:
            self.lose(f"no heartbeat for {silent_s:.0f} s: the link is down or the host is gone")

    async def ask(
        self,
        message: protocol.ToAgent,
        kind: type[Reply],
        *,
        within_s: float | None,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> Reply:
        """Send a message and return the reply of this kind; raise the error if the host refuses."""
        await self.channel.send(message)
        return await self.hear(kind, within_s=within_s, on_waiting=on_waiting)

    async def hear(
        self,
        kind: type[Reply],
        *,
        within_s: float | None,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> Reply:
        """Return the next reply of this kind; a host that does not reply in time is declared lost."""
        replies = self._replies
        deadline = None if within_s is None else time.monotonic() + within_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                reply = await asyncio.wait_for(replies.get(), left)
            except TimeoutError:
                why = f"no answer within {within_s:.0f} s"
                if replies is self._replies:
                    self.lose(why)
                raise MachineLost(f"{self.name} does not answer", why=why) from None
            match reply:
                case None:
                    replies.put_nowait(None)  # for the next caller
                    raise MachineLost(f"{self.name} is lost", why=self.lost)
                case protocol.Refused():
                    raise error_from(reply.trouble)
                case protocol.Waiting():
                    on_waiting(reply.words)
                case _ if isinstance(reply, kind):
                    return reply

    def expect(self, attempt: int) -> None:
        """Reset the state for a new attempt; late messages of the last one are ignored."""
        self._attempt = attempt
        self.ended = self.stopping = None
        self.heartbeats = ()
        self._replies = asyncio.Queue()
        if self.lost:
            self._replies.put_nowait(None)

    async def start(self, message: protocol.Start, *, within_s: float) -> protocol.Started:
        """Start the host's ranks."""
        return await self.ask(message, protocol.Started, within_s=within_s)

    async def stop(self, grace_s: float, why: str) -> None:
        """Request a stop of the host's ranks; ``ended`` is set when they have stopped."""
        await self.channel.send(protocol.Stop(attempt=self._attempt, grace_s=grace_s, why=why))

    def watch(self, on_sign: Callable[[Sign], None]) -> None:
        """Set the callback for heartbeats and stack dumps of the ranks."""
        self._on_sign = on_sign

    def follow_metrics(self, on_metrics: Callable[[protocol.TrainingMetrics], None]) -> None:
        """Set the callback for what rank 0 records of its script."""
        self._on_metrics = on_metrics

    async def engage(
        self, program: str, on_word: Callable[[Word], None], *, within_s: float
    ) -> None:
        """Start a sidecar process next to the node agent; ``on_word`` gets its lines and its exit."""
        self._on_word = on_word
        message = protocol.StartSidecar(program=program, token=self.part)
        await self.ask(message, protocol.SidecarStarted, within_s=within_s)

    def lose(self, why: str) -> None:
        """Declare the host lost."""
        if not self.lost:
            self.lost = why
            self.lost_s = time.monotonic()
            self._replies.put_nowait(None)
            self._on_word(protocol.SidecarEnded(exit_code=None, words=why))
            self._on_change()

    async def close(self) -> None:
        """Release the host; its node agent stops what is still running there."""
        tasks = [*self._tasks, *filter(None, [self._sign])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A process blocks at exit while its output is not read.
        draining = asyncio.create_task(self._drain())
        try:
            await self.channel.close()
        finally:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    async def _drain(self) -> None:
        while True:
            with contextlib.suppress(protocol.UnreadableMessage):
                if await self.channel.receive() is None:
                    return

    async def _take_in(self, on_output: Callable[[int, str], None]) -> None:
        """Receive the host's messages; declare it lost if one cannot be handled."""
        try:
            await self._take_in_all(on_output)
        except protocol.UnreadableMessage as error:
            self.lose(f"unreadable message: {error}")
        except Exception as error:
            self.lose(f"error while handling its message: {type(error).__name__}: {error}")
            await self.channel.close()

    async def _take_in_all(self, on_output: Callable[[int, str], None]) -> None:
        while True:
            message = await self.channel.receive()
            self.heard_s = time.monotonic()
            match message:
                case None:
                    words = self.channel.why_closed().rstrip(".")
                    self.lose(
                        words or "its node agent was killed or exited without an error message"
                    )
                    return
                case protocol.Alive():
                    pass
                case protocol.Output():
                    on_output(message.rank, message.text)
                case protocol.Relay() | protocol.SidecarEnded():
                    self._on_word(message)
                case protocol.TrainingMetrics():
                    self._on_metrics(message)
                case protocol.Heartbeats() if message.attempt != self._attempt:
                    pass  # from the previous attempt
                case protocol.Heartbeats():
                    self._take_heartbeats(message)
                    self._on_sign(message)
                case protocol.Evidence() | protocol.StackDump():
                    self._on_sign(message)
                case protocol.Ended():
                    self._take_end(message)
                case _:
                    self._replies.put_nowait(message)

    def _take_heartbeats(self, message: protocol.Heartbeats) -> None:
        self.heartbeats = message.heartbeats
        self.stopping, self.stopping_s = message.stopping, time.monotonic()

    def _take_end(self, message: protocol.Ended) -> None:
        """Record how the attempt ended on this host; messages of earlier attempts are ignored."""
        if self.ended is None and message.attempt == self._attempt:
            self.ended = message
            self.ended_s = time.monotonic()
            self._on_change()


def error_from(trouble: protocol.Trouble, host: str = "") -> MusterError:
    """Return the error with which a host refused a request."""
    kinds: dict[int, type[MusterError]] = {2: Impossible, 3: NotNow}
    kind = kinds.get(trouble.exit_code, MusterError)
    what = f"{host}: {trouble.what}" if host else trouble.what
    why = "\n".join(part for part in (trouble.why, trouble.evidence) if part)
    return kind(what, why=why, fix=trouble.fix)


class Stopped(Exception):
    """A stop was requested."""


class WaitingMessages:
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
    async def telling(self, words: Callable[[], str]) -> AsyncIterator[None]:
        """Print every few seconds what is being waited for."""

        async def tell() -> None:
            await asyncio.sleep(FIRST_WORD_S)
            while True:
                text = words()
                if text:
                    logger.info(text)
                await asyncio.sleep(NEXT_WORD_S)

        task = asyncio.create_task(tell())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
