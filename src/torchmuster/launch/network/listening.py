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
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil

from torchmuster.decision import Decision
from torchmuster.devices.processes import user_with_uid
from torchmuster.devices.readers import sysfs
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network.interfaces import Interface
from torchmuster.redaction import printable

PROC = Path("/proc")
LAST_USUAL_PORT = USUAL_PORT + 99
# How long a caller may take to send its request.
PATIENCE_S = 2.0
_UNKNOWN = "another user's program"
_COMMAND_SHOWN = 100
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_BACKLOG = 4096
_TRIES = 50
_LOOPBACK = protocol.Address(address="127.0.0.1", interface="lo")
_FIX = f"omit distributed.master_port to use {USUAL_PORT} or the next free port"
# Handles a connection whose caller knew the nonce; it is closed afterwards.
Conversation = Callable[[socket.socket], Awaitable[None]]


def holder_of(port: int, *, proc_root: Path = PROC) -> str | None:
    """Return the process that uses a TCP port, ``python train.py (pid 123, user ana)``; None if it is free.

    Only root can inspect other users' processes; without root only the owner is returned, if the system
    reports it.
    """
    pids = []
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr[1:] == (port,):
                # A listening process is the holder, rather than one with an accepted connection.
                listens = connection.status == psutil.CONN_LISTEN
                pids.append((not listens, connection.pid or 0))
    except (psutil.Error, OSError):  # macOS shows only the user's own
        return _UNKNOWN
    if not pids:
        return None
    _, pid = min(pids)
    if pid:
        return _process_text(pid)
    owner = _owner(port, proc_root)
    return f"a program of user {owner}" if owner else _UNKNOWN


def _process_text(pid: int) -> str:
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


def _owner(port: int, proc_root: Path) -> str | None:
    """Return the owner of a listening socket from the kernel's table, which every user can read."""
    for table in ("net/tcp", "net/tcp6"):
        for line in (sysfs.read_text(proc_root / table) or "").splitlines()[1:]:
            fields = line.split()
            listens = len(fields) > 7 and fields[3] == _LISTENS
            if listens and int(fields[1].rpartition(":")[2], 16) == port:
                return user_with_uid(int(fields[7]))
    return None


def request_line(nonce: str) -> bytes:
    """Return the request with which a caller gets the nonce."""
    return f"muster-reach {hashlib.sha256(nonce.encode()).hexdigest()}\n".encode()


class OpenPort:
    """Sockets that listen on one port at several addresses, until one of them is kept."""

    def __init__(self, sockets: dict[protocol.Address, socket.socket]) -> None:
        self._sockets = sockets
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = _port_of(next(iter(sockets.values())))  # the same at all addresses

    @property
    def addresses(self) -> tuple[protocol.Address, ...]:
        """The addresses it listens at, best first."""
        return tuple(self._sockets)

    def answer(self, nonce: str, then: Conversation | None = None) -> None:
        """Start answering callers; needs a running event loop.

        Connections of callers that knew the nonce are passed to ``then``, if given.
        """
        for sock in self._sockets.values():
            sock.setblocking(False)
            self._tasks.add(asyncio.create_task(self._accept(sock, nonce, then)))

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
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}

    async def _accept(self, sock: socket.socket, nonce: str, then: Conversation | None) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(sock)
            except OSError:  # too many open files, or the caller has disconnected
                await asyncio.sleep(0.05)
                continue
            caller = asyncio.create_task(_talk(connection, nonce, then))
            self._tasks.add(caller)
            caller.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # let it begin: if callers queue up, accept does not wait


async def _talk(connection: socket.socket, nonce: str, then: Conversation | None) -> None:
    loop = asyncio.get_running_loop()
    wanted = request_line(nonce)
    request = b""
    with connection, contextlib.suppress(OSError, TimeoutError):
        connection.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            while len(request) < len(wanted):
                piece = await loop.sock_recv(connection, 2 * len(wanted))
                if not piece:
                    return
                request += piece
            if not hmac.compare_digest(request, wanted):
                return
            await loop.sock_sendall(connection, nonce.encode() + b"\n")
        if then is not None:
            await then(connection)


def open_port(
    port: int | None, address: str | None = None, *, interfaces: Sequence[Interface] | None = None
) -> Decision[OpenPort]:
    """Listen on one port at every address that other hosts may reach, or only at the given one.

    ``port`` None uses 29400 or the next free port, 0 any free port. ``address`` may also be an interface or a
    host name.
    """
    known = network_interfaces.read_interfaces() if interfaces is None else interfaces
    where, about = _where(address, known)
    # With port 0 the first address gets a free port; it may be in use at another address.
    candidates = [0] * _TRIES
    if port:
        candidates = [port]
    elif port is None:
        candidates = [*range(USUAL_PORT, LAST_USUAL_PORT + 1), *candidates]
    for candidate in candidates:
        sockets = _bind_all(where, candidate)
        if sockets is None:
            continue
        opened = OpenPort(sockets)
        reason = ""
        if port is None and opened.port != USUAL_PORT:
            holder = holder_of(USUAL_PORT) or "a process that has just exited"
            reason = f": the next free one, because {USUAL_PORT} is used by {holder}"
        return Decision(value=opened, reason=f"port {opened.port}{reason}{about}")
    raise _port_taken(port or USUAL_PORT)


def open_loopback(port: int | None) -> socket.socket:
    """Listen on loopback only; ``port`` None or 0 uses any free port."""
    sockets = _bind_all([_LOOPBACK], port or 0)
    if sockets is None:
        raise _port_taken(port or 0)
    return sockets[_LOOPBACK]


def _where(address: str | None, known: Sequence[Interface]) -> tuple[list[protocol.Address], str]:
    """Return where to listen, and a note if that is not every address of this host."""
    own = network_interfaces.interface_candidates(known)
    if address is None:
        if own:
            return own, ""
        return [_LOOPBACK], "; only on 127.0.0.1, because this host has no other address"
    word = address.removeprefix("[").removesuffix("]")
    chosen = [candidate for candidate in own if candidate.interface == word]
    if not chosen:
        for number in _addresses_of(word):
            if network_interfaces.is_local(number, known):
                interface = network_interfaces.interface_of(number, known) or "lo"
                chosen.append(protocol.Address(address=number, interface=interface))
    if chosen:
        return chosen, f"; only on {address}, as requested"
    listed = ", ".join(f"{candidate.address} ({candidate.interface})" for candidate in own)
    raise Impossible(
        f"cannot listen on {address}",
        why=f"it is not an address, interface or name of {socket.gethostname()}; this host has "
        f"{listed or 'only 127.0.0.1'}",
        fix="set one of these with --set launch.address=…, or omit it to use an address that all other hosts reach",
    )


def _addresses_of(word: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(word))]
    except ValueError:
        return network_interfaces.resolve_host(word)


def _bind_all(
    where: Sequence[protocol.Address], port: int
) -> dict[protocol.Address, socket.socket] | None:
    """Return listening sockets on one port; None if it is in use on one of the addresses."""
    with contextlib.ExitStack() as undo:
        sockets: dict[protocol.Address, socket.socket] = {}
        trouble: OSError | None = None
        for candidate in where:
            try:
                sock = undo.enter_context(_bind(candidate.address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                trouble = error  # the address is gone or not ready yet: skip it
                continue
            sockets[candidate] = sock
            port = _port_of(sock)
        if trouble is not None and not sockets:
            is_privileged = trouble.errno == errno.EACCES
            why = f"{trouble.strerror}; ports below 1024 need root"
            raise Impossible(
                f"cannot listen on port {port}",
                why=why if is_privileged else str(trouble.strerror),
                fix=_FIX,
            ) from None
        undo.pop_all()
        return sockets


def _bind(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "nt":  # there, address reuse would let others take the port away
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)  # type: ignore[attr-defined,unused-ignore]
        else:  # connections of an earlier run may linger; the listener still owns the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def _port_taken(port: int) -> Impossible:
    holder = holder_of(port)
    return Impossible(
        f"port {port} is in use",
        why=f"it is used by {holder}" if holder else "it was in use a moment ago",
        fix=f"{_FIX}, or stop that program",
    )
