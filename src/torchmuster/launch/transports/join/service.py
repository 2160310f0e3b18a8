"""The host's side of joining: a transport whose machines come by themselves.

It listens on the given addresses, speaks TLS with a certificate made for this run, and gives each
place to the machine that brings its token. A machine that is lost before its ranks were started loses
its place, which gets a new code.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Arrive, make_room_for
from torchmuster.launch.transports.join import certificate, code, listener, token_registry
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.connection_handler import (
    IN_LINE,
    LISTENED_TO,
    ConnectionHandler,
    ConnectionLimiter,
    JoinNews,
)
from torchmuster.launch.transports.join.stream import Stream
from torchmuster.launch.transports.join.token_registry import Join, Refused, TokenRegistry, Welcome
from torchmuster.redaction import printable


class JoinedChannel:
    """A channel (channel.py) over TLS.

    ``on_lost`` is called when the connection has ended; it is told whether the machine's ranks had
    been started by then, or the run was over.
    """

    def __init__(self, stream: Stream, name: str, on_lost: Callable[[bool], None]) -> None:
        self._stream = stream
        self._name = name
        self._started = False
        self._on_lost = on_lost
        stream.on_lost = self._lost

    def _lost(self) -> None:
        self._on_lost(self._started)

    async def send(self, message: protocol.ToAgent) -> None:
        """Send a message; on a closed channel this does nothing."""
        if isinstance(message, protocol.Start | protocol.Leave):
            self._started = True
        await self._stream.send(protocol.encode(message))

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the machine has gone. Raises ``wire.Garbled``."""
        return await self._stream.receive(protocol.MESSAGE_LIMIT, protocol.decode_from_agent)

    def why_closed(self) -> str:
        """Say what is known of the cause."""
        return f"{self._name}: {self._stream.why_closed}" if self._stream.why_closed else ""

    async def close(self) -> None:
        """Let go of the machine."""
        await self._stream.close()


NEWS_EVERY_S = 10.0


class JoinService:
    """A transport (channel.py) for ``count`` places from ``first_place`` on.

    Places are numbered as in the whole run, here and in codes; ``places`` has the names of this
    service's own, in their order. ``on_event`` is told in plain words, and at a bounded rate, what
    happens at the door; ``on_code`` that a place became free again, and its new code.
    """

    def __init__(
        self,
        *,
        count: int,
        addresses: Sequence[str],
        on_event: Callable[[str], None],
        on_code: Callable[[int, JoinCode], None],
        first_place: int = 1,
        port: int | None = None,
        announce: bool = True,
    ) -> None:
        if first_place + count > code.MOST_PLACES:
            raise Impossible(
                f"{first_place + count} machines cannot join one run",
                why=f"join codes have room for {code.MOST_PLACES}",
            )
        self._count = count
        self._addresses = tuple(addresses)
        self._port = port
        self._announce = announce
        self._on_event = on_event
        self._on_code = on_code
        self._news = JoinNews(on_event, NEWS_EVERY_S)
        self._token_registry = TokenRegistry(first_place, count)
        self._channels: dict[int, JoinedChannel] = {}
        self._lost_at_s: dict[int, float] = {}
        self._opened_at_s = time.monotonic()
        self._reception: ConnectionHandler | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def places(self) -> Sequence[str]:
        """The names of the machines: ``machine 2`` until it has joined, its own name then."""
        return self._token_registry.names()

    async def open(self, arrive: Arrive) -> None:
        """Listen, and begin to let machines in. ``codes`` can be asked for after this."""
        # All machines of a large run may come at once; they should wait rather than be turned away.
        in_line = make_room_for(self._count + LISTENED_TO, wanted=self._count + IN_LINE)
        self._arrive = arrive
        self._certificate = certificate.make_certificate()
        listeners = listener.open_listeners(self._addresses, self._port)
        self._port = listeners[0].getsockname()[1]
        self._opened_at_s = time.monotonic()
        self._reception = ConnectionHandler(
            listeners=listeners,
            context=self._certificate.context,
            decide=self._decide,
            news=self._news,
            door=ConnectionLimiter(in_line=in_line),
        )
        if self._announce:
            self._announcing = asyncio.create_task(self._announce_until_cancelled(self._port))

    async def _announce_until_cancelled(self, port: int) -> None:
        try:
            await listener.announce(
                self._certificate.fingerprint, port=port, addresses=self._addresses
            )
        except Exception as error:  # whatever it is: machines can join without this
            self._on_event(
                f"this host cannot be found on the local network by itself ({error}); "
                "the codes have its addresses"
            )

    async def reopen(self, place: int) -> None:
        """Free the place of a machine that was lost, and give out a new code for it."""
        channel = self._channels.pop(place, None)
        if channel is not None:
            self._vacate(place)
            await channel.close()

    def waiting_for(self, place: int) -> str:
        """Say why a machine is not here yet."""
        now_s = time.monotonic()
        if place in self._lost_at_s:
            lost_s = now_s - self._lost_at_s[place]
            return f"the connection broke {lost_s:.0f} s ago; its new code is not used yet"
        return f"its code is not used yet, {now_s - self._opened_at_s:.0f} s"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return None: a machine can join for as long as it is waited for."""
        return None

    def rejoins(self, place: int) -> bool:
        """Return True: a place that was given up is free for whoever has its new code."""
        return True

    async def close(self) -> None:
        """Stop listening, let go of everybody; the codes are worth nothing from here on."""
        self._closed = True
        self._news.close()
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        if self._reception is not None:
            await self._reception.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    @property
    def port(self) -> int:
        """The port on which machines join, once this is open."""
        assert self._port is not None, "not open yet"
        return self._port

    def codes(self) -> dict[int, JoinCode]:
        """Return the code of every place that is free."""
        return {place: self._code(place) for place in self._token_registry.missing()}

    def _code(self, place: int) -> JoinCode:
        return JoinCode(
            place=place,
            port=self.port,
            addresses=listener.in_codes(self._addresses, code.MOST_ADDRESSES),
            token=self._token_registry.token(place),
            fingerprint=self._certificate.fingerprint,
        )

    def _decide(self, join: Join, address: str, stream: Stream) -> Welcome | Refused:
        refusal = self._token_registry.examine(join.place, join.token)
        if refusal is not None and refusal.by is None:
            self._news.note("a wrong join code", address)
            return token_registry.refused_message(
                "unknown-code", "this host has not given out such a code"
            )
        if refusal is not None:
            self._news.note("a join code that was used before", address)
            return token_registry.refused_message(
                "used-code", f"this code has been used by {refusal.by}"
            )
        host = printable([join.host])
        if join.protocol != protocol.PROTOCOL:
            self._news.note(f"a machine with torchmuster {join.torchmuster!r}", address)
            return token_registry.refused_message(
                "other-protocol",
                f"{host} speaks protocol {join.protocol}, the host speaks {protocol.PROTOCOL}",
            )
        self._token_registry.seat(join.place, host=host, address=address)
        self._seat(join.place, host, stream)
        return Welcome(protocol=protocol.PROTOCOL, place=join.place)

    def _seat(self, place: int, host: str, stream: Stream) -> None:
        def lost(started: bool) -> None:
            # A place that was given to another machine in the meantime is not ours to free.
            if self._channels.get(place) is channel and not started and not self._closed:
                del self._channels[place]
                self._vacate(place)

        channel = JoinedChannel(stream, host, lost)
        self._channels[place] = channel
        self._lost_at_s.pop(place, None)
        # Not from within the handshake: the first message must not overtake the welcome.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._arrive, place, channel)
        if stream.lost:  # it said join and went away
            loop.call_soon(lost, False)

    def _vacate(self, place: int) -> None:
        self._token_registry.vacate(place)
        self._lost_at_s[place] = time.monotonic()
        self._on_code(place, self._code(place))
