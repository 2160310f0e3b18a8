"""The host's side of joining: a transport to which machines connect by themselves.

It listens on the given addresses, uses TLS with a certificate made for this run, and gives a place to each machine
that presents the secret of the run. The launcher frees the place of a machine that is lost (``reopen``).

No input is trusted before the secret was checked. Until then a connection gets ``GREET_S`` and one message of
``JOIN_LIMIT`` bytes, and there are at most ``MOST_UNPROVEN`` such connections. While there are that many, the next one waits
in the kernel's queue, and if no handshake ends within ``CROWD_S``, all are closed: slow clients delay the others, but do not
keep them out.
"""

import asyncio
import errno
import functools
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from torchmuster import __version__
from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces
from torchmuster.launch.transports.channel import Arrive, Transport, allow_open_files
from torchmuster.launch.transports.join import messages
from torchmuster.launch.transports.join.certificate import make_certificate
from torchmuster.launch.transports.join.code import (
    MOST_ADDRESSES,
    SECRET_BYTES,
    JoinCode,
    SharedKey,
)
from torchmuster.launch.transports.join.messages import (
    JOIN_LIMIT,
    MOST_PLACES,
    Join,
    Reason,
    Refused,
    Welcome,
)
from torchmuster.launch.transports.join.stream import MessageChannel, Stream, accept_stream
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.redaction import printable

GREET_S = 10.0
CROWD_S = 1.0
MOST_UNPROVEN = 64
_BACKLOG = 4096
# Without a fixed port: how often to try another one, if the first is in use on another address.
_TRIES = 20
_ACCEPT_AGAIN_S = 0.05


JoinedChannel = MessageChannel[protocol.FromAgent]


class JoinTransport(Transport):
    """A transport (channel.py) for ``count`` machines that join.

    It listens on these addresses, or on all that other machines can use. With ``local`` the first place is this host, which is not counted. ``on_event`` gets the first connection with a wrong
    code, and the first with another protocol. ``on_code`` gets the join code once it is known. With ``key``, which all
    nodes share, each node makes the code itself.
    """

    def __init__(
        self,
        *,
        count: int,
        on_event: Callable[[str], None],
        on_code: Callable[[JoinCode], None] = lambda code: None,
        local: LocalTransport | None = None,
        addresses: Sequence[str] | None = None,
        port: int | None = None,
        key: SharedKey | None = None,
    ) -> None:
        first = 0 if local is None else 1
        self._numbers = range(first, first + count)
        if self._numbers.stop > MOST_PLACES:
            raise Impossible(
                f"{self._numbers.stop} machines cannot join one run",
                why=f"at most {MOST_PLACES} machines can",
            )
        self._local = local
        self._addresses = list(addresses or interfaces.addresses_for_others())
        self._port = port
        self._secret = secrets.token_bytes(SECRET_BYTES) if key is None else key.secret
        self._seed = None if key is None else key.seed
        self._on_event = on_event
        self._on_code = on_code
        self._reported: set[Reason] = set()
        self._names: dict[int, str] = {}
        self._channels: dict[int, JoinedChannel] = {}
        self._lost_at_s: dict[int, float] = {}
        self._opened_at_s = time.monotonic()
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._unproven: set[asyncio.Task[None]] = set()

    @property
    def places(self) -> Sequence[str]:
        """The names of the machines: ``machine 2`` until it has joined, then its host name. Names are unique."""
        names = [] if self._local is None else list(self._local.places)
        taken = set(names)
        for number in self._numbers:
            name = self._names.get(number, f"machine {number + 1}")
            if name in taken:
                name = f"{name} ({number + 1})"
            taken.add(name)
            names.append(name)
        return names

    @property
    def code(self) -> JoinCode:
        """The join code of the run, once this is open."""
        assert self._port is not None, "not open yet"
        return JoinCode(
            port=self._port,
            addresses=tuple(self._addresses[:MOST_ADDRESSES]),
            secret=self._secret,
            pin=self._certificate.pin,
        )

    async def open(self, arrive: Arrive) -> None:
        """Start to accept machines, and start the node agent of this host."""
        allow_open_files(len(self._numbers) + MOST_UNPROVEN)
        self._arrive = arrive
        self._certificate = make_certificate(self._seed)
        self._listeners = open_listeners(self._addresses, self._port)
        self._port = self._listeners[0].getsockname()[1]
        self._opened_at_s = time.monotonic()
        self._on_code(self.code)
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in self._listeners]
        if self._local is not None:
            await self._local.open(arrive)

    async def reopen(self, place: int) -> None:
        """Free the place of a lost machine, so that it can join again; start the node agent of this host again."""
        if self._local is not None and place == 0:
            await self._local.reopen(place)
            return
        channel = self._channels.pop(place, None)
        if channel is not None:
            del self._names[place]
            self._lost_at_s[place] = time.monotonic()
            await channel.close()

    def waiting_for(self, place: int) -> str:
        """Return why a machine has not joined yet."""
        if self._local is not None and place == 0:
            return self._local.waiting_for(place)
        now_s = time.monotonic()
        if place in self._lost_at_s:
            return f"its connection was lost {now_s - self._lost_at_s[place]:.0f} s ago"
        return f"not connected yet, {now_s - self._opened_at_s:.0f} s"

    def rejoins(self, place: int) -> bool:
        """Return whether it is a machine that can join again with the same code: all but this host."""
        return place in self._numbers

    async def close(self) -> None:
        """Stop listening and close all connections; the code is invalid after this."""
        tasks = [*self._accepting, *self._unproven]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _accept(self, listener: socket.socket) -> None:
        """Start the handshake of every connection, of at most ``MOST_UNPROVEN`` at a time."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # too many open files, or the client has disconnected
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            try:
                await self._wait_for_room()
            except asyncio.CancelledError:
                connection.close()
                raise
            guest = asyncio.create_task(self._greet(connection))
            self._unproven.add(guest)
            guest.add_done_callback(functools.partial(self._forget, connection))
            # With many connections in the queue, accept does not wait: let other tasks run.
            await asyncio.sleep(0)

    def _forget(self, connection: socket.socket, guest: asyncio.Task[None]) -> None:
        self._unproven.discard(guest)
        if guest.cancelled():  # perhaps before it owned the connection
            connection.close()

    async def _wait_for_room(self) -> None:
        while len(self._unproven) >= MOST_UNPROVEN:
            done, _ = await asyncio.wait(
                self._unproven, timeout=CROWD_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:  # they delay everybody else; the handshakes of a busy launcher end one after the other
                for client in list(self._unproven):
                    client.cancel()
                await asyncio.wait(self._unproven)
            await asyncio.sleep(0)  # the callbacks of those that are done remove them

    async def _greet(self, connection: socket.socket) -> None:
        """Do the handshake with a client, and let it in if it has the secret."""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(GREET_S):
                stream = await accept_stream(connection, self._certificate.context, GREET_S)
                join = await stream.receive(JOIN_LIMIT, messages.decode_join)
            if join is not None:
                await self._answer(join, stream)
                return
        except (OSError, protocol.UnreadableMessage):  # also a timeout, and any error of TLS
            pass
        except asyncio.CancelledError:
            if stream is not None:
                stream.abort("the host has stopped accepting machines")
            raise
        except Exception as error:  # what a stranger sends must not end the run
            self._on_event(f"closed a connection from a machine: {type(error).__name__}: {error}")
        if stream is not None:
            stream.abort("no join request")

    async def _answer(self, join: Join, stream: Stream) -> None:
        answer = self._decide(join, stream)
        if isinstance(answer, Refused):
            await stream.send(msgspec.json.encode(answer))
            await stream.close()
            return
        channel = MessageChannel(stream, protocol.decode_from_agent)
        self._channels[answer.place] = channel
        self._names[answer.place] = printable([join.host])
        self._lost_at_s.pop(answer.place, None)
        await stream.send(msgspec.json.encode(answer))
        self._arrive(answer.place, channel)

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
                raise _cannot_listen(error, address, port) from error
    raise NotNow(
        f"no port is free on all of {', '.join(addresses)}", why=f"{_TRIES} ports were tried"
    )


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones inherit it
    return listener


def _cannot_listen(error: OSError, address: str, port: int | None) -> MusterError:
    if error.errno == errno.EADDRINUSE:
        return NotNow(
            f"port {port} is in use on {address}",
            why="another program listens there",
            fix=f"ss -ltnp 'sport = :{port}'  # shows which; or omit the port to use any free one",
        )
    return Impossible(
        f"cannot listen on {address}",
        why=str(error.strerror or error),
        fix="ip -brief address  # lists the addresses of this host; ports below 1024 need root",
    )
