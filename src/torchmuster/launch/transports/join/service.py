"""The host's side of joining: a transport to which machines connect by themselves.

It listens on the given addresses, uses TLS with a certificate made for this run, and gives a place to each machine
that presents the secret of the run. A machine that is lost before its ranks were started loses its place.

No input is trusted before the secret was checked: until then a connection may use some seconds and one message of a
kilobyte, and the number of such connections is bounded.
"""

import asyncio
import errno
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from torchmuster import __version__
from torchmuster.errors import Impossible, NotNow
from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Arrive, make_room_for
from torchmuster.launch.transports.join import messages
from torchmuster.launch.transports.join.certificate import make_certificate
from torchmuster.launch.transports.join.code import (
    MOST_PLACES,
    SECRET_BYTES,
    JoinCode,
    addresses_for_code,
)
from torchmuster.launch.transports.join.messages import JOIN_LIMIT, Join, Reason, Refused, Welcome
from torchmuster.launch.transports.join.stream import Stream, StreamProtocol
from torchmuster.redaction import printable

HANDSHAKE_S = 5.0
JOIN_S = 5.0
# Connections whose secret has not been checked yet; more of them are closed at once.
MOST_UNPROVEN = 1024
_BACKLOG = 4096
# Without a fixed port: how often to try another one, if the first is in use on another address.
_TRIES = 20
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


class JoinService:
    """A transport (channel.py) for ``count`` places from ``first_place`` on.

    Places are numbered as in the whole run; ``places`` has the names of this service's places only. ``on_event`` gets
    the first connection with a wrong code, and the first with another protocol. ``secret`` and ``seed`` (of the
    certificate) are random if they are not given.
    """

    def __init__(
        self,
        *,
        count: int,
        addresses: Sequence[str],
        on_event: Callable[[str], None],
        first_place: int = 1,
        port: int | None = None,
        secret: bytes | None = None,
        seed: bytes | None = None,
    ) -> None:
        if first_place + count > MOST_PLACES:
            raise Impossible(
                f"{first_place + count} machines cannot join one run",
                why=f"at most {MOST_PLACES} machines can",
            )
        self._addresses = list(addresses)
        self._port = port
        self._seed = seed
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._on_event = on_event
        self._reported: set[Reason] = set()
        self._names: dict[int, str] = {}
        self._numbers = range(first_place, first_place + count)
        self._channels: dict[int, JoinedChannel] = {}
        self._lost_at_s: dict[int, float] = {}
        self._opened_at_s = time.monotonic()
        self._servers: list[asyncio.Server] = []
        self._unproven: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def places(self) -> Sequence[str]:
        """The names of the machines: ``machine 2`` until it has joined, then its host name."""
        return [self._names.get(number, f"machine {number + 1}") for number in self._numbers]

    @property
    def code(self) -> JoinCode:
        """The join code of the run, once this is open."""
        assert self._port is not None, "not open yet"
        return JoinCode(
            port=self._port,
            addresses=addresses_for_code(self._addresses),
            secret=self._secret,
            fingerprint=self._certificate.fingerprint,
        )

    async def open(self, arrive: Arrive) -> None:
        """Start listening and accepting machines."""
        make_room_for(len(self._numbers), wanted=MOST_UNPROVEN)
        self._arrive = arrive
        self._certificate = make_certificate(self._seed)
        listeners = open_listeners(self._addresses, self._port)
        self._port = listeners[0].getsockname()[1]
        self._opened_at_s = time.monotonic()
        loop = asyncio.get_running_loop()
        for listener in listeners:
            server = await loop.create_server(
                lambda: StreamProtocol(self._connected),
                sock=listener,
                ssl=self._certificate.context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
            self._servers.append(server)

    async def reopen(self, place: int) -> None:
        """Free the place of a lost machine, so that it can join again."""
        channel = self._channels.pop(place, None)
        if channel is not None:
            self._vacate(place)
            await channel.close()

    def waiting_for(self, place: int) -> str:
        """Return why a machine has not joined yet."""
        now_s = time.monotonic()
        if place in self._lost_at_s:
            return f"its connection was lost {now_s - self._lost_at_s[place]:.0f} s ago"
        return f"not connected yet, {now_s - self._opened_at_s:.0f} s"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return None: a machine can join as long as the launcher waits."""
        return None

    def rejoins(self, place: int) -> bool:
        """Return True: a machine can join again with the same code."""
        return True

    async def close(self) -> None:
        """Stop listening and close all connections; the code is invalid after this."""
        self._closed = True
        for server in self._servers:
            server.close()
        for task in self._unproven:
            task.cancel()
        await asyncio.gather(*self._unproven, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _connected(self, stream: Stream) -> None:
        """Begin the handshake with a connection that has done TLS."""
        if self._closed or len(self._unproven) >= MOST_UNPROVEN:
            stream.abort("too many connections")
            return
        task = asyncio.create_task(self._greet(stream))
        self._unproven.add(task)
        task.add_done_callback(self._unproven.discard)

    async def _greet(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(JOIN_S):
                join = await stream.receive(JOIN_LIMIT, messages.decode_join)
            if join is None:
                await stream.close()
                return
            answer = self._decide(join, stream)
            if isinstance(answer, Refused):
                await stream.send(messages.encode_join_message(answer))
                await stream.close()
                return
            channel = self._seat(answer.place, printable([join.host]), stream)
            await stream.send(messages.encode_join_message(answer))
            if not stream.lost:
                self._arrive(answer.place, channel)
        except (TimeoutError, protocol.UnreadableMessage):
            stream.abort("no join request")
        except asyncio.CancelledError:
            stream.abort("the host has stopped accepting machines")
            raise
        except Exception as error:  # what a stranger sends must not end the run
            stream.abort(f"failed: {type(error).__name__}: {error}")
            self._on_event(f"closed a connection from a machine: {type(error).__name__}: {error}")

    def _decide(self, join: Join, stream: Stream) -> Welcome | Refused:
        if not hmac.compare_digest(join.secret, self._secret):
            return self._refuse("wrong-code", "this host has not printed this code", stream)
        if join.protocol != protocol.PROTOCOL:
            why = f"{printable([join.host])} uses protocol {join.protocol}, the host uses {protocol.PROTOCOL}"
            return self._refuse("other-protocol", why, stream)
        candidates = self._numbers if join.place is None else [join.place]
        for place in candidates:
            if place in self._numbers and place not in self._channels:
                return Welcome(protocol=protocol.PROTOCOL, place=place)
        return self._refuse("no-place", "all machines of this run have joined", stream)

    def _refuse(self, reason: Reason, why: str, stream: Stream) -> Refused:
        if reason not in self._reported and reason != "no-place":
            self._reported.add(reason)
            self._on_event(f"refused a connection from {stream.peer_address()}: {why}")
        return Refused(reason=reason, why=why, protocol=protocol.PROTOCOL, torchmuster=__version__)

    def _seat(self, place: int, host: str, stream: Stream) -> JoinedChannel:
        def lost(started: bool) -> None:
            # Do not free a place that another machine has taken in the meantime.
            if self._channels.get(place) is channel and not started and not self._closed:
                del self._channels[place]
                self._vacate(place)

        channel = JoinedChannel(stream, lost)
        self._channels[place] = channel
        self._names[place] = host
        self._lost_at_s.pop(place, None)
        return channel

    def _vacate(self, place: int) -> None:
        del self._names[place]
        self._lost_at_s[place] = time.monotonic()


def open_listeners(addresses: Sequence[str], port: int | None) -> list[socket.socket]:
    """Return a listening socket for each address, all with the same port. None: any port that is free on all of them."""
    for _ in range(_TRIES):
        listeners: list[socket.socket] = []
        chosen = port or 0
        try:
            for address in addresses:
                listeners.append(_listener(address, chosen))
                chosen = listeners[0].getsockname()[1]
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if error.errno != errno.EADDRINUSE or port:
                raise _explained(error, address, port) from error
    raise NotNow(
        f"no port is free on all of {', '.join(addresses)}", why=f"{_TRIES} ports were tried"
    )


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones inherit it
    return listener


def _explained(error: OSError, address: str, port: int | None) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return NotNow(
            f"port {port} is in use on {address}",
            why="another program listens there",
            fix=f"ss -ltnp 'sport = :{port}'  # shows which; or omit the port to use any free one",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return Impossible(
            f"{address} is not an address of this host", fix="ip -brief address  # lists them"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Impossible(
            f"this user is not allowed to use port {port}",
            why=str(error.strerror),
            fix="choose a port above 1023",
        )
    return Impossible(f"cannot listen on {address}", why=str(error))
