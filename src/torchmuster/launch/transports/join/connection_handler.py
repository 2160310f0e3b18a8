"""Accept connections, and admit those that present a valid token in time.

No input is trusted here. Before its token has been checked, a connection may use a few seconds, one
message of a kilobyte and an entry in a bounded queue.
"""

import asyncio
import functools
import ipaddress
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torchmuster.launch import protocol
from torchmuster.launch.transports.join import token_registry
from torchmuster.launch.transports.join.stream import Stream, open_stream
from torchmuster.launch.transports.join.token_registry import JOIN_LIMIT, Join, Refused, Welcome

LISTENED_TO = 256
IN_LINE = 1024
# How long a connection is served while others wait. A join request takes milliseconds.
CHANCE_S = 2.0

Who = TypeVar("Who", bound=Hashable)


def source_of(address: str) -> str:
    """Return the source of a connection: an IPv4 address, or the /64 network of an IPv6 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        parsed = parsed.ipv4_mapped
    return str(parsed)


@dataclass(frozen=True, kw_only=True)
class ConnectionTurn(Generic[Who]):
    """The connections to serve from now on, and those to close for them."""

    begin: tuple[Who, ...]
    cut_off: tuple[Who, ...]


@dataclass(kw_only=True)
class ConnectionLimiter(Generic[Who]):
    """The connections being served, oldest first, and those in the queue. Times are monotonic."""

    listened_to: int = LISTENED_TO
    in_line: int = IN_LINE
    chance_s: float = CHANCE_S
    _since_s: dict[Who, float] = field(default_factory=dict)
    _line: dict[str, deque[Who]] = field(default_factory=dict)  # by source, the next one first
    _length: int = 0

    @property
    def waiting(self) -> int:
        """The number of connections in the queue."""
        return self._length

    def arrive(self, who: Who, source: str) -> Who | None:
        """Queue a new connection; return the one to reject if the queue is full."""
        self._line.setdefault(source, deque()).append(who)
        self._length += 1
        if self._length <= self.in_line:
            return None
        longest = max(self._line, key=lambda one: len(self._line[one]))
        return self._pop(longest, last=True)

    def turn(self, now_s: float) -> ConnectionTurn[Who]:
        """Serve as many as the limit allows; call this after every change, and periodically."""
        begin, cut_off = [], []
        while self._line:
            if len(self._since_s) >= self.listened_to:
                oldest, since_s = next(iter(self._since_s.items()))
                if now_s - since_s < self.chance_s:
                    break
                del self._since_s[oldest]
                cut_off.append(oldest)
            who = self._next_in_line()
            self._since_s[who] = now_s
            begin.append(who)
        return ConnectionTurn(begin=tuple(begin), cut_off=tuple(cut_off))

    def leave(self, who: Who) -> None:
        """Remove a served connection; do nothing if it was already removed."""
        self._since_s.pop(who, None)

    def _next_in_line(self) -> Who:
        source = next(iter(self._line))
        who = self._pop(source, last=False)
        if source in self._line:  # behind the other sources
            self._line[source] = self._line.pop(source)
        return who

    def _pop(self, source: str, *, last: bool) -> Who:
        queue = self._line[source]
        who = queue.pop() if last else queue.popleft()
        self._length -= 1
        if not queue:
            del self._line[source]
        return who


class JoinNews:
    """Report the first event of a kind at once, and count the following ones for an interval."""

    def __init__(self, tell: Callable[[str], None], every_s: float) -> None:
        self._tell = tell
        self._every_s = every_s
        self._held: dict[str, tuple[int, str]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def note(self, kind: str, source: str) -> None:
        """Record a rejected connection: the kind, ``a wrong join code``, and its source."""
        if kind in self._timers:
            self._held[kind] = self._held.get(kind, (0, ""))[0] + 1, source
        else:
            self._tell(f"refused {kind} from {source}")
            self._wait(kind)

    def _wait(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        self._timers[kind] = loop.call_later(self._every_s, self._interval_over, kind)

    def _interval_over(self, kind: str) -> None:
        del self._timers[kind]
        if kind in self._held:
            count, source = self._held.pop(kind)
            self._tell(
                f"refused {kind} {count} more times within {self._every_s:g} s, "
                f"the last time from {source}"
            )
            self._wait(kind)

    def close(self) -> None:
        """Stop reporting."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


HANDSHAKE_S = 5
JOIN_S = 5.0
# After accept failed: out of files or out of memory.
_PAUSE_S = 0.1

# How often the queue is checked if nothing else happens.
_TICK_S = 0.25

# Decides about a join request, given the client's address and its stream.
Decide = Callable[[Join, str, Stream], Welcome | Refused]


class ConnectionHandler:
    """Handle new connections. ``decide`` assigns places; its answer is sent to the client."""

    def __init__(
        self,
        *,
        listeners: Sequence[socket.socket],
        context: ssl.SSLContext,
        decide: Decide,
        news: JoinNews,
        door: ConnectionLimiter[socket.socket],
    ) -> None:
        self._context = context
        self._decide = decide
        self._news = news
        self._door = door
        self._addresses: dict[socket.socket, str] = {}
        self._greeting: dict[socket.socket, asyncio.Task[None]] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._closed = False
        self._listeners = listeners
        self._accepting = [asyncio.create_task(self._accept(one)) for one in listeners]

    async def close(self) -> None:
        """Stop listening and close pending connections; admitted ones stay open."""
        self._closed = True
        if self._tick is not None:
            self._tick.cancel()
        tasks = [*self._accepting, *self._greeting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in list(self._addresses):
            self._turn_away(waiting)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                newcomer, (address, *_) = await loop.sock_accept(listener)
            except ConnectionError:  # closed before it was accepted
                continue
            except OSError as error:
                self._news.note("a connection that could not be accepted", f"the network ({error})")
                await asyncio.sleep(_PAUSE_S)
                continue
            self._addresses[newcomer] = address
            if too_many := self._door.arrive(newcomer, source_of(address)):
                self._news.note("a connection over the connection limit", self._addresses[too_many])
                self._turn_away(too_many)
            self._serve_the_line()
            # While connections are pending, sock_accept does not yield; other tasks run here.
            await asyncio.sleep(0)

    def _serve_the_line(self) -> None:
        if self._closed:
            return
        turn = self._door.turn(time.monotonic())
        for silent in turn.cut_off:
            self._news.note("a silent connection", self._addresses[silent])
            self._greeting[silent].cancel()
        for newcomer in turn.begin:
            task = asyncio.create_task(self._greet(newcomer, self._addresses[newcomer]))
            self._greeting[newcomer] = task
            # Not in the task itself: a task that is cancelled at once never starts.
            task.add_done_callback(functools.partial(self._greeted, newcomer))
        if self._door.waiting and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self._serve_the_line()

    def _turn_away(self, newcomer: socket.socket) -> None:
        del self._addresses[newcomer]
        newcomer.close()

    def _greeted(self, newcomer: socket.socket, task: asyncio.Task[None]) -> None:
        del self._greeting[newcomer]
        address = self._addresses.pop(newcomer)
        if task.cancelled():
            newcomer.close()
        elif (error := task.exception()) is not None:
            newcomer.close()
            self._news.note(f"a connection that caused {type(error).__name__}", address)
        self._door.leave(newcomer)
        self._serve_the_line()

    async def _greet(self, newcomer: socket.socket, address: str) -> None:
        try:
            stream = await open_stream(
                newcomer, self._context, server_side=True, handshake_s=HANDSHAKE_S
            )
        except ssl.SSLError:
            self._news.note("a connection without TLS 1.3", address)
            return
        except ConnectionAbortedError:  # asyncio's error for a handshake timeout
            self._news.note("a connection that sent nothing in time", address)
            return
        except OSError:  # closed: the client tries several addresses, or only scanned the port
            return
        try:
            join = await self._listen(stream, address)
            if join is not None:
                answer = self._decide(join, address, stream)
                if isinstance(answer, Welcome):
                    # An admitted connection no longer counts against the limit.
                    self._door.leave(newcomer)
                await stream.send(token_registry.encode_join_message(answer))
                if isinstance(answer, Welcome):
                    return
            await stream.close()
        except asyncio.CancelledError:
            stream.abort("the connection limit was reached, or the host stopped accepting machines")
            raise
        except BaseException as error:  # any error closes the connection that caused it
            stream.abort(f"failed: {type(error).__name__}: {error}")
            raise

    async def _listen(self, stream: Stream, address: str) -> Join | None:
        try:
            async with asyncio.timeout(JOIN_S):
                return await stream.receive(JOIN_LIMIT, token_registry.decode_join)
        except TimeoutError:
            self._news.note("a connection that sent nothing in time", address)
        except protocol.UnreadableMessage:
            self._news.note("a connection without a join request", address)
        return None
