"""The rendezvous port of the ranks, opened before a run starts.

The first host opens it on each of its addresses; the others try which addresses they reach (``reach.py``),
and get the run's nonce as the answer so that they know which run they reached. The address that all hosts can
reach is kept, and its socket is passed to torch's store, so that no other program can take the port in between
and nothing listens on the other addresses.

A caller sends ``muster-reach`` and the SHA-256 of the nonce. Only a caller that knows the nonce gets it as the
answer, and nothing that a caller sent is ever sent back.
"""

import asyncio
import contextlib
import errno
import hashlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Sequence

import psutil

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network.interfaces import Interface
from torchmuster.redaction import printable

LAST_USUAL_PORT = USUAL_PORT + 99
# How long a caller may take to send its request.
PATIENCE_S = 2.0
_LONGEST_REQUEST = 128  # bytes
_COMMAND_SHOWN = 100
_BACKLOG = 4096
_TRIES = 50
_LOOPBACK = protocol.Address(address="127.0.0.1", interface="lo")
_FIX = f"omit distributed.master_port to use {USUAL_PORT} or the next free port"
# Handles a connection whose caller knew the nonce; it is closed afterwards.
Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def holder_of(port: int) -> str | None:
    """Return the process that uses a TCP port, ``python train.py (pid 123, user ana)``; None if it is free.

    Only root can inspect other users' processes.
    """
    pids = []
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr[1:] == (port,):
                # A listening process is the holder, rather than one with an accepted connection.
                listens = connection.status == psutil.CONN_LISTEN
                pids.append((not listens, connection.pid or 0))
    except (psutil.Error, OSError):  # macOS shows only the user's own
        pids.append((True, 0))
    if not pids:
        return None
    _, pid = min(pids)
    if not pid:
        return "another user's program"
    try:
        process = psutil.Process(pid)
        command = printable(process.cmdline() or [process.name()])
        if len(command) > _COMMAND_SHOWN:
            # The program is at one end, its arguments at the other.
            half = _COMMAND_SHOWN // 2
            command = f"{command[:half]} … {command[-half:]}"
        return f"{command} (pid {pid}, user {process.username()})"
    except (psutil.Error, OSError):
        return f"pid {pid}"


def request_line(nonce: str) -> bytes:
    """Return the request with which a caller gets the nonce."""
    return f"muster-reach {hashlib.sha256(nonce.encode()).hexdigest()}\n".encode()


class OpenPort:
    """Sockets that listen on one port at several addresses, until one of them is kept."""

    def __init__(self, sockets: dict[protocol.Address, socket.socket]) -> None:
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []
        self._callers: set[asyncio.Task[None]] = set()
        self.port = _port_of(next(iter(sockets.values())))  # the same at all addresses

    @property
    def addresses(self) -> tuple[protocol.Address, ...]:
        """The addresses it listens at, best first."""
        return tuple(self._sockets)

    async def answer(self, nonce: str, then: Conversation | None = None) -> None:
        """Start answering callers.

        Connections of callers that knew the nonce are passed to ``then``, if given.
        """

        def on_caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            caller = asyncio.create_task(_talk(reader, writer, nonce, then))
            self._callers.add(caller)
            caller.add_done_callback(self._callers.discard)

        for sock in self._sockets.values():
            # A server closes its socket; ours is passed on to the store.
            server = await asyncio.start_server(
                on_caller, sock=sock.dup(), limit=_LONGEST_REQUEST, backlog=_BACKLOG
            )
            self._servers.append(server)

    async def keep(self, address: str) -> socket.socket:
        """Stop answering, close all sockets but the one at this address, and return that one."""
        for candidate in self._sockets:
            if candidate.address == address:
                chosen = self._sockets.pop(candidate)
                await self.close()
                chosen.setblocking(True)
                return chosen
        raise ValueError(f"{address} is not one of the opened addresses")

    async def close(self) -> None:
        """Stop answering and close all sockets."""
        for server in self._servers:
            server.close()
        callers = list(self._callers)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        for sock in self._sockets.values():
            sock.close()
        self._servers, self._sockets = [], {}


async def _talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    nonce: str,
    then: Conversation | None,
) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            request = await reader.readline()
        if hmac.compare_digest(request, request_line(nonce)):
            writer.write(nonce.encode() + b"\n")
            await writer.drain()
            if then is not None:
                await then(reader, writer)
    except (OSError, TimeoutError, ValueError):  # ValueError: a line that is too long
        pass
    finally:
        writer.close()


def open_port(
    port: int | None, address: str | None = None, *, interfaces: Sequence[Interface] | None = None
) -> Decision[OpenPort]:
    """Listen on one port at every address that other hosts may reach, or only at the given one.

    ``port`` None uses 29400 or the next free port, 0 any free port. ``address`` may also be a host name.
    """
    known = network_interfaces.read_interfaces() if interfaces is None else interfaces
    addresses, note = _addresses(address, known)
    numbers = [own.address for own in addresses]
    candidates = [port]
    if port is None:
        candidates = [*range(USUAL_PORT, LAST_USUAL_PORT + 1), 0]
    for candidate in candidates:
        sockets = bind_all(numbers, candidate or 0)
        if sockets is None:
            continue
        opened = OpenPort(
            {own: sockets[own.address] for own in addresses if own.address in sockets}
        )
        reason = f"port {opened.port}"
        if port is None and opened.port != USUAL_PORT:
            holder = holder_of(USUAL_PORT) or "a process that has just exited"
            reason += f": the next free one, because {USUAL_PORT} is used by {holder}"
        return Decision(value=opened, reason=reason + note)
    raise port_taken(port or USUAL_PORT)


def open_loopback(port: int | None) -> socket.socket:
    """Listen on loopback only; ``port`` None or 0 uses any free port."""
    sockets = bind_all([_LOOPBACK.address], port or 0)
    if sockets is None:
        raise port_taken(port or 0)
    return sockets[_LOOPBACK.address]


def _addresses(
    address: str | None, known: Sequence[Interface]
) -> tuple[list[protocol.Address], str]:
    """Return where to listen, and a note if that is not every address of this host."""
    own = network_interfaces.interface_candidates(known)
    if address is None:
        if own:
            return own, ""
        return [_LOOPBACK], "; only on 127.0.0.1, because this host has no other address"
    chosen = []
    for number in network_interfaces.resolve_host(address.strip("[]")):
        if network_interfaces.is_local(number, known):
            interface = network_interfaces.interface_of(number, known) or "lo"
            chosen.append(protocol.Address(address=number, interface=interface))
    if chosen:
        return chosen, f"; only on {address}, as requested"
    listed = ", ".join(f"{candidate.address} ({candidate.interface})" for candidate in own)
    raise Impossible(
        f"cannot listen on {address}",
        why=f"it is not an address or name of {socket.gethostname()}; this host has "
        f"{listed or 'only 127.0.0.1'}",
        fix="set one of these with --set launch.address=…, or omit it to use an address that all other hosts reach",
    )


def bind_all(addresses: Sequence[str], port: int) -> dict[str, socket.socket] | None:
    """Return sockets that listen on one port, by address; None if it is in use on one of the addresses.

    With port 0, the first address gets a free port; as it may be in use at another address, several are tried.
    """
    for _ in range(1 if port else _TRIES):
        with contextlib.ExitStack() as undo:
            sockets: dict[str, socket.socket] = {}
            failure: OSError | None = None
            number = port
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                try:
                    # It sets SO_REUSEADDR where that only skips connections of an earlier run, which linger.
                    sock = socket.create_server((address, number), family=family, backlog=_BACKLOG)
                except OSError as error:
                    failure = error
                    if error.errno == errno.EADDRINUSE:
                        break
                    continue  # the address is gone or not ready yet: skip it
                sockets[address] = undo.enter_context(sock)
                number = _port_of(sock)
            if failure is not None and failure.errno == errno.EADDRINUSE:
                continue
            if not sockets and failure is not None:
                raise Impossible(
                    f"cannot listen on {', '.join(addresses)}",
                    why=f"{failure.strerror}; ports below 1024 need root",
                    fix="ip -brief address  # shows the addresses of this host",
                )
            undo.pop_all()
            return sockets
    return None


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def port_taken(port: int) -> Impossible:
    """Return the error for a port that another program uses."""
    holder = holder_of(port)
    return Impossible(
        f"port {port} is in use",
        why=f"it is used by {holder}" if holder else "it was in use a moment ago",
        fix=f"{_FIX}, or stop that program",
    )
