"""One connected host as the launcher sees it: its channel, its state and its replies."""

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from torchmuster.errors import Impossible, MachineLost, MusterError, NotNow
from torchmuster.launch import protocol
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.transports.channel import Channel

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=protocol.Message)


class HostState(enum.Enum):
    """What a host does."""

    CONNECTED = enum.auto()  # it has not introduced itself yet
    JOINED = enum.auto()
    RUNNING = enum.auto()  # it belongs to the attempt; its ranks run, or are about to be started
    ENDED = enum.auto()  # its ranks have ended
    LOST = enum.auto()


class ConnectedHost:
    """A host that connected."""

    def __init__(
        self,
        place: int,
        name: str,
        channel: Channel,
        part: str,
        *,
        on_message: "Callable[[ConnectedHost, protocol.FromAgent], None]" = lambda *_: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect; ``on_message`` gets what the host reports unasked: output, heartbeats, metrics, stack dumps."""
        self.place = place
        self.name = name
        self.channel = channel
        self.part = part  # the token of the processes that this node agent starts
        self.state = HostState.CONNECTED
        self.record: protocol.NodeRecord | None = None
        self.prepared: protocol.Prepared | None = None
        self.waiting_for = ""  # what delays its answer
        self.clock_offset_s = 0.0
        self.ended: protocol.Ended | None = None
        self.ended_s = 0.0
        self.why_lost: str | None = None
        self.lost_s = 0.0
        self.heard_s = time.monotonic()
        self.heartbeats: tuple[Heartbeat, ...] = ()  # the newest of its ranks
        self.stopping: protocol.Stopping | None = None  # as last reported, at stopping_s
        self.stopping_s = 0.0
        self._attempt = -1
        self._replies: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()
        self._on_message = on_message
        self._on_change = on_change
        self._on_sidecar: Callable[[protocol.Relay], None] = lambda _: None
        self._receiving: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost."""
        return self.state is HostState.LOST

    @property
    def is_here(self) -> bool:
        """Whether it has joined and is not lost."""
        return self.state not in (HostState.CONNECTED, HostState.LOST)

    @property
    def has_failed(self) -> bool:
        """Whether its ranks failed, or it was lost before they ended."""
        return self.is_lost if self.ended is None else not self.ended.good

    @property
    def has_gpus(self) -> bool:
        """Whether its ranks use GPUs; False until it is prepared."""
        return self.prepared is not None and self.prepared.devices != ("CPU",)

    def listen(self) -> None:
        """Start receiving."""
        self._receiving = asyncio.create_task(self._receive())

    def join(self, record: protocol.NodeRecord) -> None:
        """Record what the host says about itself."""
        self.clock_offset_s = record.clock_unix_s - time.time()
        self.record = record
        if self.state is HostState.CONNECTED:
            self.state = HostState.JOINED

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
    ) -> Reply:
        """Send a message and return the reply of this kind; raise the error if the host refuses."""
        await self.channel.send(message)
        self.waiting_for = ""
        return await self.hear(kind, within_s=within_s)

    async def hear(self, kind: type[Reply], *, within_s: float | None) -> Reply:
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
                    raise MachineLost(f"{self.name} is lost", why=self.why_lost or "")
                case protocol.Done(trouble=protocol.Trouble() as trouble):
                    raise error_from(trouble)
                case _ if isinstance(reply, kind):
                    return reply

    def expect(self, attempt: int) -> None:
        """Reset the state for a new attempt; late messages of the last one are ignored."""
        self._attempt = attempt
        self.ended = self.stopping = None
        self.heartbeats = ()
        self._replies = asyncio.Queue()
        if self.is_lost:
            self._replies.put_nowait(None)
        else:
            self.state = HostState.RUNNING

    async def stop(self, grace_s: float, why: str) -> None:
        """Request a stop of the host's ranks; ``ended`` is set when they have stopped."""
        await self.channel.send(protocol.Stop(attempt=self._attempt, grace_s=grace_s, why=why))

    async def start_sidecar(
        self, on_message: Callable[[protocol.Relay], None], *, within_s: float
    ) -> None:
        """Start a sidecar process next to the node agent; ``on_message`` gets its lines and its exit."""
        self._on_sidecar = on_message
        message = protocol.Relay(token=self.part)
        await self.ask(message, protocol.Done, within_s=within_s)

    def lose(self, why: str) -> None:
        """Declare the host lost."""
        if not self.is_lost:
            self.state = HostState.LOST
            self.why_lost = why
            self.lost_s = time.monotonic()
            self._replies.put_nowait(None)
            self._on_sidecar(protocol.Relay(text=why, is_last=True))
            self._on_change()

    async def close(self) -> None:
        """Release the host; its node agent stops what is still running there."""
        try:
            await (
                self.channel.close()
            )  # received until then: a process blocks at exit while its output is not read
        finally:
            if self._receiving is not None:
                self._receiving.cancel()
                await asyncio.gather(self._receiving, return_exceptions=True)

    async def _receive(self) -> None:
        """Receive the host's messages; declare it lost if one cannot be handled."""
        try:
            while True:
                message = await self.channel.receive()
                self.heard_s = time.monotonic()
                if message is None:
                    self.lose(
                        self.channel.why_closed().rstrip(".")
                        or "its node agent was killed or exited without an error message"
                    )
                    return
                self._handle(message)
        except protocol.UnreadableMessage as error:
            self.lose(f"unreadable message: {error}")
        except Exception as error:
            self.lose(f"error while handling its message: {type(error).__name__}: {error}")
            await self.channel.close()

    def _handle(self, message: protocol.FromAgent) -> None:
        match message:
            case protocol.Alive():
                self.waiting_for = message.waiting_for or self.waiting_for
            case protocol.Relay():
                self._on_sidecar(message)
            case protocol.Heartbeats():
                if message.attempt == self._attempt:
                    self.heartbeats = message.heartbeats
                    self.stopping, self.stopping_s = message.stopping, time.monotonic()
                    self._on_message(self, message)
            case protocol.Output() | protocol.Done(dumped_stacks=True):
                self._on_message(self, message)
            case protocol.Ended():
                # Those of earlier attempts, and answers to a late request to stop, do not count.
                if self.ended is None and message.attempt == self._attempt:
                    self.ended = message
                    self.ended_s = time.monotonic()
                    if self.state is HostState.RUNNING:
                        self.state = HostState.ENDED
                    self._on_change()
            case _:
                self._replies.put_nowait(message)


def error_from(trouble: protocol.Trouble) -> MusterError:
    """Return the error with which a host refused a request."""
    kinds: dict[int, type[MusterError]] = {2: Impossible, 3: NotNow}
    kind = kinds.get(trouble.exit_code, MusterError)
    why = "\n".join(part for part in (trouble.why, trouble.evidence) if part)
    return kind(trouble.what, why=why, fix=trouble.fix)
