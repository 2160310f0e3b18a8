"""Probe the path that ssh takes to a host, from this host.

Needs neither root nor a program on the host.
"""

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.connection import problem_of
from torchmuster.diagnose.links.messages import Interface
from torchmuster.diagnose.links.serve import interfaces_here
from torchmuster.launch.network import interfaces as network

_CONNECTED_WITHIN_S = 2.0
_GREETED_WITHIN_S = 1.8
# The kernel reports an unanswered ARP request after 3 s.
_OPENED_WITHIN_S = 3.6
_TOLD_WITHIN_S = 4.0
_PINGED_WITHIN_S = 2.5
# The "discard" port is unused today: a host that is up refuses, or a firewall drops the packet.
_UNUSED_PORT = 9


@dataclass(frozen=True, kw_only=True)
class Knock:
    """The result of connecting to a port: ``problem`` is "" if it succeeded.

    ``greeted``: the server sent data or closed the connection.
    """

    problem: str
    seconds: float
    greeted: bool = False


async def knock_on_port(address: str, port: int, *, within_s: float = _CONNECTED_WITHIN_S) -> Knock:
    """Connect, and wait for the server's greeting."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_connect(sock, (address, port))
        except OSError as error:
            seconds = time.monotonic() - began
            return Knock(problem=problem_of(error, seconds), seconds=seconds)
        seconds = time.monotonic() - began
        try:
            async with asyncio.timeout(_GREETED_WITHIN_S):
                await loop.sock_recv(sock, 1)
        except TimeoutError:
            return Knock(problem="", seconds=seconds)
        except OSError:  # it closed the connection
            pass
    return Knock(problem="", seconds=seconds, greeted=True)


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
    nothing does. ``silent_card``: not even its network adapter answers.
    """

    address: str
    port: int
    knock: Knock
    local: str = ""
    interface: Interface | None = None
    alive: str = ""
    silent_card: bool = False

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
    return SshProblem(
        address=address,
        port=way.port,
        knock=knocked,
        local=locals_[address],
        interface=interface_for(address, locals_[address], interfaces_here()),
        alive=alive,
        silent_card=card in ("FAILED", "INCOMPLETE"),
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
