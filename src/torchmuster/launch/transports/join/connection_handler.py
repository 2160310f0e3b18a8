"""The door: takes connections, and lets through those who show a token in time.

Nothing that comes in here is trusted. Before its token has been seen a connection may cost a few
seconds, one message of a kilobyte, and a place in a bounded line (admission.py).
"""

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.transports.join import handshake
from torchmuster.launch.transports.join.admission import Door, source_of
from torchmuster.launch.transports.join.handshake import JOIN_LIMIT, Join, Sorry, Welcome
from torchmuster.launch.transports.join.news import News
from torchmuster.launch.transports.join.stream import Stream, open_stream

HANDSHAKE_S = 5
JOIN_S = 5.0
# After the system could not give us a connection: out of files, out of memory.
_PAUSE_S = 0.1

# How often those in line are seen to if nothing else happens.
_TICK_S = 0.25

# Decides, at once and for good, about a machine that asks to be let in, and its address.
Decide = Callable[[Join, str, Stream], Welcome | Sorry]


class Reception:
    """Greets everybody who connects. ``decide`` gives places away; what it welcomes is told so."""

    def __init__(
        self,
        *,
        listeners: Sequence[socket.socket],
        context: ssl.SSLContext,
        decide: Decide,
        news: News,
        door: Door[socket.socket],
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
        """Stop listening, and let go of those at the door; those who were let through stay."""
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
            except ConnectionError:  # gone before it was taken
                continue
            except OSError as error:
                self._news.note("a connection that could not be taken", f"the network ({error})")
                await asyncio.sleep(_PAUSE_S)
                continue
            self._addresses[newcomer] = address
            if too_many := self._door.arrive(newcomer, source_of(address)):
                self._news.note("a connection at a crowded door", self._addresses[too_many])
                self._turn_away(too_many)
            self._serve_the_line()
            # While others queue, sock_accept does not yield; those who are in get their turn here.
            await asyncio.sleep(0)

    def _serve_the_line(self) -> None:
        if self._closed:
            return
        turn = self._door.turn(time.monotonic())
        for silent in turn.cut_off:
            self._news.note("to wait for a silent connection", self._addresses[silent])
            self._greeting[silent].cancel()
        for newcomer in turn.begin:
            task = asyncio.create_task(self._greet(newcomer, self._addresses[newcomer]))
            self._greeting[newcomer] = task
            # Not in the task itself: one that is cancelled at once never begins.
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
            self._news.note("a connection that does not speak TLS 1.3", address)
            return
        except ConnectionAbortedError:  # what asyncio calls a handshake that takes too long
            self._news.note("a connection that said nothing in time", address)
            return
        except OSError:  # gone: it tries several addresses, or only looked who is there
            return
        try:
            join = await self._listen(stream, address)
            if join is not None:
                answer = self._decide(join, address, stream)
                if isinstance(answer, Welcome):
                    # From here on it need not make way for those who wait.
                    self._door.leave(newcomer)
                await stream.send(handshake.encode(answer))
                if isinstance(answer, Welcome):
                    return
            await stream.close()
        except BaseException:  # whatever a stranger's bytes cause, its connection ends with it
            stream.abort("the door was closed, or crowded, or an error came up")
            raise

    async def _listen(self, stream: Stream, address: str) -> Join | None:
        try:
            async with asyncio.timeout(JOIN_S):
                return await stream.receive(JOIN_LIMIT, handshake.decode_join)
        except TimeoutError:
            self._news.note("a connection that said nothing in time", address)
        except protocol.Garbled:
            self._news.note("a connection that did not ask to join", address)
        return None
