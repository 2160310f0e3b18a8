"""The host's side of joining: a transport to which machines connect by themselves.

It listens on the given addresses, uses TLS with a certificate made for this run, and gives a place to each machine
that presents the secret of the run. The launcher frees the place of a machine that is lost (``reopen``).

No input is trusted before the secret was checked. Until then a connection gets ``GREET_S`` and one message of
``JOIN_LIMIT`` bytes, and there are at most ``MOST_UNPROVEN`` such connections. While there are that many, the next one waits
in the kernel's queue, and if no handshake ends within ``CROWD_S``, all are closed: slow clients delay the others, but do not
keep them out.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Sequence

import msgspec

from torchmuster import __version__
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces, listening
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
_ACCEPT_AGAIN_S = 0.05


JoinedChannel = MessageChannel[protocol.FromAgent]


class JoinTransport(Transport):
    """A transport (channel.py) for ``count`` machines that join.

    It listens on these addresses, or on all that other machines can use. With ``local`` the first place is this host, which is not counted. ``on_event`` gets the first connection with a wrong
    code, and the first with another protocol. The first of ``ports`` that is free is used; 0 is any. ``on_code`` gets the join code once it is known. With ``key``, which all
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
        ports: Sequence[int] = (0,),
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
        self._ports = ports
        self._port = 0  # that it listens on
        self._secret = secrets.token_bytes(SECRET_BYTES) if key is None else key.secret
        self._seed = None if key is None else key.seed
        self._on_event = on_event
        self._on_code = on_code
        self._reported: set[Reason] = set()
        self._names = [*local.places] if local is not None else []
        self._names += [f"machine {number + 1}" for number in self._numbers]
        self._channels: dict[int, JoinedChannel] = {}
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._unproven: set[asyncio.Task[None]] = set()

    @property
    def places(self) -> Sequence[str]:
        """The names of the machines: ``machine 2`` until it has joined, then its host name. Names are unique."""
        return self._names

    @property
    def code(self) -> JoinCode:
        """The join code of the run, once this is open."""
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
        for port in self._ports:
            listeners = listening.bind_all(self._addresses, port)
            if listeners is not None:
                break
        else:
            raise listening.port_taken(port)
        self._addresses, self._listeners = [*listeners], [*listeners.values()]
        self._port = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            listener.setblocking(False)
            # Accepted connections inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            self._names[place] = f"machine {place + 1}"
            await channel.close()

    def waiting_for(self, place: int) -> str:
        """Return why a machine has not joined yet."""
        if self._local is not None and place == 0:
            return self._local.waiting_for(place)
        return "not connected"

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
            await self._wait_for_room()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # too many open files, or the client has disconnected
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            guest = asyncio.create_task(self._greet(connection))
            self._unproven.add(guest)
            guest.add_done_callback(self._unproven.discard)
            # With many connections in the queue, accept does not wait: let other tasks run.
            await asyncio.sleep(0)

    async def _wait_for_room(self) -> None:
        # Each listener may accept one more.
        while len(self._unproven) > MOST_UNPROVEN - len(self._listeners):
            done, waiting = await asyncio.wait(
                self._unproven, timeout=CROWD_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:  # they delay everybody else; the handshakes of a busy launcher end one after the other
                for client in waiting:
                    client.cancel()
                await asyncio.wait(waiting)
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
        except Exception as error:  # what a stranger sends must not end the run
            self._on_event(f"closed a connection from a machine: {type(error).__name__}: {error}")
        except asyncio.CancelledError:
            if stream is not None:
                stream.abort("the host has stopped accepting machines")
            raise
        if stream is not None:
            stream.abort("no join request")

    async def _answer(self, join: Join, stream: Stream) -> None:
        name = printable([join.host])
        candidates = self._numbers if join.place is None else [join.place]
        free = [
            place for place in candidates if place in self._numbers and place not in self._channels
        ]
        if not hmac.compare_digest(join.secret, self._secret):
            await self._refuse("wrong-code", "this host has not printed this code", stream)
        elif join.protocol != protocol.PROTOCOL:
            why = f"{name} uses protocol {join.protocol}, the host uses {protocol.PROTOCOL}"
            await self._refuse("other-protocol", why, stream)
        elif not free:
            await self._refuse("no-place", "all machines of this run have joined", stream)
        else:
            place = free[0]
            channel = MessageChannel(stream, protocol.decode_from_agent)
            self._channels[place] = channel
            if name in self._names:
                name = f"{name} ({place + 1})"
            self._names[place] = name
            await stream.send(msgspec.json.encode(Welcome(protocol=protocol.PROTOCOL, place=place)))
            self._arrive(place, channel)

    async def _refuse(self, reason: Reason, why: str, stream: Stream) -> None:
        if reason not in self._reported and reason != "no-place":
            self._reported.add(reason)
            self._on_event(f"refused a connection from {stream.peer_address()}: {why}")
        answer = Refused(
            reason=reason, why=why, protocol=protocol.PROTOCOL, torchmuster=__version__
        )
        await stream.send(msgspec.json.encode(answer))
        await stream.close()
