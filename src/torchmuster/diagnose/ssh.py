"""Probe the path that ssh takes to a host, from this host.

Needs neither root nor a program on the host.
"""

import asyncio
import contextlib
import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.connection import problem_of
from torchmuster.diagnose.links.messages import Interface
from torchmuster.diagnose.links.serve import interfaces_here
from torchmuster.launch.network import interfaces as network

_LOOK_EVERY_S = 0.05
_CONNECTED_WITHIN_S = 2.0
# TCP retransmits lost packets after 0.2, 0.6 and 1.4 s.
_HEARD_WITHIN_S = 1.8
_GREETING = b"SSH-2.0-torchmuster\r\n"
_MSG_IGNORE = 2
_HEADERS_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}


@dataclass(frozen=True, kw_only=True)
class Knock:
    """The result of connecting to a port: ``problem`` is "" if it succeeded.

    ``greeted``: the server sent data or closed the connection. ``sent_bytes`` is the size of one
    test packet, ``arrived`` whether it was acknowledged; both are None if the system does not
    report it.
    """

    problem: str
    seconds: float
    greeted: bool = False
    sent_bytes: int | None = None
    arrived: bool | None = None


async def knock_on_port(
    address: str,
    port: int,
    *,
    frame_bytes: int | None = None,
    within_s: float = _CONNECTED_WITHIN_S,
) -> Knock:
    """Connect, and send one packet of the maximum size, or one that fits a frame of this size."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    began = time.monotonic()
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        if frame_bytes is not None:
            most = frame_bytes - _HEADERS_BYTES[family]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, most)
        try:
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except OSError as error:
            seconds = time.monotonic() - began
            return Knock(problem=problem_of(error, seconds), seconds=seconds)
        return await _talk(sock, time.monotonic() - began)


async def _talk(sock: socket.socket, seconds: float) -> Knock:
    heard = asyncio.Event()
    listening = asyncio.create_task(_listen_ssh(sock, heard))
    sent = _segment_bytes(sock)
    arrived = None if sent is None else False
    try:
        if sent is not None:
            with contextlib.suppress(OSError):  # already closed, which is an answer too
                await asyncio.get_running_loop().sock_sendall(sock, _message(sent))
        until = time.monotonic() + _HEARD_WITHIN_S
        is_late = False
        while not is_late and (arrived is False or not heard.is_set()):
            is_late = time.monotonic() > until  # check once more after a delay of this process
            await asyncio.sleep(_LOOK_EVERY_S)
            if arrived is False:
                # A server that closes the connection has nothing left to acknowledge.
                arrived = listening.done() or _unacknowledged_bytes(sock) == 0
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return Knock(
        problem="", seconds=seconds, greeted=heard.is_set(), sent_bytes=sent, arrived=arrived
    )


async def _listen_ssh(sock: socket.socket, heard: asyncio.Event) -> None:
    """Read what the server sends, until it closes the connection."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while await loop.sock_recv(sock, 1 << 16):
            heard.set()
    heard.set()


def _message(size: int) -> bytes:
    """Return a greeting and a message that ssh servers ignore, together ``size`` bytes."""
    room = size - len(_GREETING)
    # Packet length, padding length, message type, data length, data, padding; the total is a
    # multiple of 8.
    whole = room // 8 * 8
    padding = 8
    data = whole - 4 - 1 - 1 - 4 - padding
    head = struct.pack("!IBBI", whole - 4, padding, _MSG_IGNORE, data)
    message = head + bytes(data + padding)
    return (_GREETING + message).ljust(size, b"\0")


def _segment_bytes(sock: socket.socket) -> int | None:
    """Return the segment size of a connection; None if acknowledgements cannot be observed."""
    if sys.platform != "linux":
        return None
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)


def _unacknowledged_bytes(sock: socket.socket) -> int:
    import fcntl  # missing on Windows, where this is never called
    import termios

    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, struct.pack("@i", 0))
    return int(struct.unpack("@i", answer)[0])


# The kernel reports an unanswered ARP request after 3 s.
_OPENED_WITHIN_S = 3.6
_TOLD_WITHIN_S = 4.0
_PINGED_WITHIN_S = 2.5
# The "discard" port is unused today: a host that is up refuses, or a firewall drops the packet.
_UNUSED_PORT = 9
_FRAMES_BYTES = (1500, 1400, 1280)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The address that ssh uses for a host. ``renamed``: ssh's config sets another name for it."""

    addresses: tuple[str, ...]
    port: int
    renamed: bool

    @property
    def leads_here(self) -> str:
        """The first address, if it belongs to this host; else ""."""
        first = next(iter(self.addresses), "")
        return first if first and network.is_local(first) else ""


@dataclass(frozen=True, kw_only=True)
class SshProblem:
    """What was observed on the path to an address.

    ``local`` is the source address; "" without a route. ``interface`` is the one on the network of
    the address, or with the route to it. ``alive`` says what shows that the host is up; "" if
    nothing does. ``silent_card``: not even its network adapter answers. ``passing`` is a knock with
    a smaller packet that arrived where a large one did not; ``frame_bytes`` is the frame it needs.
    """

    address: str
    port: int
    knock: Knock
    local: str = ""
    interface: Interface | None = None
    alive: str = ""
    silent_card: bool = False
    passing: Knock | None = None
    frame_bytes: int | None = None

    @property
    def same_network(self) -> bool:
        """Whether both are on the same network, without a router between them."""
        return self.interface is not None and _has_network_of(self.interface, self.address)


async def ssh_destination(host: str) -> Destination | None:
    """Read the destination from ``ssh -G``; None if it is unknown, or goes through a proxy."""
    told = await _output(["ssh", "-G", "--", host])
    settings = dict(line.split(None, 1) for line in (told or "").splitlines() if " " in line)
    through = (settings.get(word, "none") for word in ("proxyjump", "proxycommand"))
    name, port = settings.get("hostname", ""), settings.get("port", "")
    if not name or not port.isdecimal() or any(one != "none" for one in through):
        return None
    addresses = await asyncio.to_thread(network.resolve_host, name)
    renamed = name.lower() != host.rpartition("@")[2].lower()
    return Destination(addresses=tuple(addresses), port=int(port), renamed=renamed)


async def find_ssh_problem(way: Destination) -> SshProblem:
    """Probe the path to a host, within 5 s."""
    locals_ = {address: _local_end(address) for address in way.addresses}
    # As ssh does: skip addresses without a route.
    address = next((one for one in way.addresses if locals_[one]), way.addresses[0])
    knocked, other, answers_ping = await asyncio.gather(
        knock_on_port(address, way.port, within_s=_OPENED_WITHIN_S),
        knock_on_port(address, _UNUSED_PORT, within_s=_PINGED_WITHIN_S),
        _answers_ping(address),
    )
    card = await _neighbour(address)
    alive = ""
    if answers_ping:
        alive = "it answers ping"
    elif other.problem in ("", "refused"):
        alive = f"it answers on port {_UNUSED_PORT}"
    elif card == "REACHABLE" and knocked.problem:
        alive = "its network adapter answers"
    passing, frame_bytes = await _smaller(address, way.port, knocked)
    return SshProblem(
        address=address,
        port=way.port,
        knock=knocked,
        local=locals_[address],
        interface=interface_for(address, locals_[address], interfaces_here()),
        alive=alive,
        silent_card=card in ("FAILED", "INCOMPLETE"),
        passing=passing,
        frame_bytes=frame_bytes,
    )


def interface_for(address: str, local: str, known: Sequence[Interface]) -> Interface | None:
    """Return the interface for an address: one on its network, else the one with the route.

    Of several on this network, a connected one is preferred.
    """
    own = [one for one in known if _has_network_of(one, address)]
    used = [one for one in known if any(word.split("/")[0] == local for word in one.networks)]
    working = [one for one in own if one.connected]
    return next(iter([*(one for one in working if one in used), *working, *own, *used]), None)


def _has_network_of(interface: Interface, address: str) -> bool:
    wanted = ipaddress.ip_address(address)
    return any(wanted in ipaddress.ip_interface(one).network for one in interface.networks)


async def _smaller(address: str, port: int, big: Knock) -> tuple[Knock | None, int | None]:
    """If a large packet did not arrive, return the largest usual one that does, and its frame."""
    if big.problem or big.arrived is not False or big.sent_bytes is None:
        return None, None
    tried = await asyncio.gather(
        *(knock_on_port(address, port, frame_bytes=size) for size in _FRAMES_BYTES)
    )
    for size, one in zip(_FRAMES_BYTES, tried, strict=True):
        if one.arrived and one.sent_bytes is not None and one.sent_bytes < big.sent_bytes:
            return one, size
    return None, None


def _local_end(address: str) -> str:
    """Return the source address for packets to this address, without sending any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, _UNUSED_PORT))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


async def _answers_ping(address: str) -> bool:
    return await _output(["ping", "-c", "1", address], within_s=_PINGED_WITHIN_S) is not None


async def _neighbour(address: str) -> str:
    """Return the state of this address in the neighbour table (ARP); "" if it has no entry."""
    told = await _output(["ip", "neighbour", "show", "to", address])
    return (told or "").split()[-1] if (told or "").strip() else ""


async def _output(words: Sequence[str], *, within_s: float = _TOLD_WITHIN_S) -> str | None:
    """Return what a program prints; None if it is missing, fails or times out."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(within_s):
            told, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return told.decode(errors="replace") if process.returncode == 0 else None
