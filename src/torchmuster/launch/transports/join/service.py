"""The host's side of joining: a transport to which machines connect by themselves.

It listens on the given addresses, uses TLS with a certificate made for this run, and assigns each place
to the machine that presents its token. A machine that is lost before its ranks were started loses its
place, which gets a new code.
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

_ALIVE = protocol.encode(protocol.Alive())


class JoinedChannel:
    """A channel (channel.py) over TLS.

    ``on_lost`` is called when the connection has ended; its argument is whether the machine's ranks had
    been started by then, or the run was over.
    """

    def __init__(self, stream: Stream, on_lost: Callable[[bool], None]) -> None:
        self._stream = stream
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

    def say_alive(self) -> bool:
        """Send a heartbeat if that needs no waiting; return whether it was sent."""
        return self._stream.send_at_once(_ALIVE)

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the machine is gone. Raises ``UnreadableMessage``."""
        return await self._stream.receive(protocol.MESSAGE_LIMIT, protocol.decode_from_agent)

    def why_closed(self) -> str:
        """Return the known cause of the end."""
        return self._stream.why_closed

    async def close(self) -> None:
        """Close the connection to the machine."""
        await self._stream.close()


NEWS_EVERY_S = 10.0


class JoinService:
    """A transport (channel.py) for ``count`` places from ``first_place`` on.

    Places are numbered as in the whole run, here and in codes; ``places`` has the names of this service's
    places only. ``on_event`` gets rate-limited messages about connections; ``on_code`` is called with the
    new code when a place becomes free again. ``make_token`` returns the next token of a place. ``seed`` determines the
    certificate. Both make codes that a machine can know in advance and use again.
    """

    def __init__(
        self,
        *,
        count: int,
        addresses: Sequence[str],
        on_event: Callable[[str], None],
        on_code: Callable[[int, JoinCode], None] = lambda place, code: None,
        first_place: int = 1,
        port: int | None = None,
        announce: bool = True,
        make_token: Callable[[int], bytes] = token_registry.new_token,
        seed: bytes | None = None,
    ) -> None:
        if first_place + count > code.MOST_PLACES:
            raise Impossible(
                f"{first_place + count} machines cannot join one run",
                why=f"join codes support at most {code.MOST_PLACES} machines",
            )
        self._count = count
        self._addresses = tuple(addresses)
        self._port = port
        self._announce = announce
        self._seed = seed
        self._on_event = on_event
        self._on_code = on_code
        self._news = JoinNews(on_event, NEWS_EVERY_S)
        self._token_registry = TokenRegistry(first_place, count, make_token=make_token)
        self._channels: dict[int, JoinedChannel] = {}
        self._lost_at_s: dict[int, float] = {}
        self._opened_at_s = time.monotonic()
        self._reception: ConnectionHandler | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def places(self) -> Sequence[str]:
        """The names of the machines: ``machine 2`` until it has joined, then its host name."""
        return self._token_registry.names()

    async def open(self, arrive: Arrive) -> None:
        """Start listening and accepting machines. ``codes`` can be called after this."""
        # All machines of a large run may connect at once; they should wait rather than be rejected.
        in_line = make_room_for(self._count + LISTENED_TO, wanted=self._count + IN_LINE)
        self._arrive = arrive
        self._certificate = certificate.make_certificate(self._seed)
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
        except Exception as error:  # machines can join without the announcement
            self._on_event(
                f"this host cannot announce itself on the local network ({error}); "
                "the long codes contain its addresses"
            )

    async def reopen(self, place: int) -> None:
        """Free the place of a lost machine, and report a new code for it."""
        channel = self._channels.pop(place, None)
        if channel is not None:
            self._vacate(place)
            await channel.close()

    def waiting_for(self, place: int) -> str:
        """Return why a machine has not joined yet."""
        now_s = time.monotonic()
        if place in self._lost_at_s:
            lost_s = now_s - self._lost_at_s[place]
            since = f"its connection was lost {lost_s:.0f} s ago"
            return since if self._seed else f"{since}; its new code has not been used yet"
        waited_s = now_s - self._opened_at_s
        if self._seed:
            return f"not connected yet, {waited_s:.0f} s"
        return f"its code has not been used yet, {waited_s:.0f} s"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return None: a machine can join as long as the launcher waits."""
        return None

    def rejoins(self, place: int) -> bool:
        """Return True: a machine can rejoin with the new code of its place."""
        return True

    async def close(self) -> None:
        """Stop listening and close all connections; the codes are invalid after this."""
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

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the certificate, once this is open."""
        return self._certificate.fingerprint

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
                "unknown-code", "this host has not issued this code"
            )
        if refusal is not None:
            self._news.note("a join code that was used before", address)
            return token_registry.refused_message(
                "used-code", f"this code was used by {refusal.by}"
            )
        host = printable([join.host])
        if join.protocol != protocol.PROTOCOL:
            self._news.note(f"a machine with torchmuster {join.torchmuster!r}", address)
            return token_registry.refused_message(
                "other-protocol",
                f"{host} uses protocol {join.protocol}, the host uses {protocol.PROTOCOL}",
            )
        self._token_registry.seat(join.place, host=host, address=address)
        self._seat(join.place, stream)
        return Welcome(protocol=protocol.PROTOCOL, place=join.place)

    def _seat(self, place: int, stream: Stream) -> None:
        def lost(started: bool) -> None:
            # Do not free a place that another machine has taken in the meantime.
            if self._channels.get(place) is channel and not started and not self._closed:
                del self._channels[place]
                self._vacate(place)

        channel = JoinedChannel(stream, lost)
        self._channels[place] = channel
        self._lost_at_s.pop(place, None)
        # Not within the handshake: the first message must not be sent before the welcome.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._arrive, place, channel)
        if stream.lost:  # it sent the join request and disconnected
            loop.call_soon(lost, False)

    def _vacate(self, place: int) -> None:
        self._token_registry.vacate(place)
        self._lost_at_s[place] = time.monotonic()
        self._on_code(place, self._code(place))
