"""The way that ssh takes to a host, looked at from this machine: where it leads, and how far one comes.

Needs neither root nor anything on the other side.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.links.messages import Interface
from torchmuster.diagnose.links.serve import interfaces_here
from torchmuster.diagnose.ssh_port import Knock, knock
from torchmuster.launch.network import interfaces as network

# That nobody is at an address is known after 3 s.
_OPENED_WITHIN_S = 3.6
_TOLD_WITHIN_S = 4.0
_PINGED_WITHIN_S = 2.5
# Nobody serves "discard" any more: a machine that is on says so, or a firewall drops it.
_UNUSED_PORT = 9
_FRAMES_BYTES = (1500, 1400, 1280)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where ssh goes for a host. ``renamed``: its settings say another name or address."""

    addresses: tuple[str, ...]
    port: int
    renamed: bool

    @property
    def leads_here(self) -> str:
        """The first of the addresses, if it is this machine's own; else ""."""
        first = next(iter(self.addresses), "")
        return first if first and network.is_local(first) else ""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen on the way to an address.

    ``local`` is our own address on this way; "" without a route. ``interface`` is the one that has the
    network of the address or leads there. ``alive`` says what shows that the machine is on; "" if
    nothing does. ``silent_card``: not even its network card answers. ``passing`` is a knock with a
    smaller packet, which arrived, where a big one did not; ``frame_bytes`` is the frame it needs.
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
        """Whether no router is between this machine and that one."""
        return self.interface is not None and _has_network_of(self.interface, self.address)


async def destination(host: str) -> Destination | None:
    """Ask ssh itself where it goes; None if it does not say, or goes through another machine."""
    told = await _output(["ssh", "-G", "--", host])
    settings = dict(line.split(None, 1) for line in (told or "").splitlines() if " " in line)
    through = (settings.get(word, "none") for word in ("proxyjump", "proxycommand"))
    name, port = settings.get("hostname", ""), settings.get("port", "")
    if not name or not port.isdecimal() or any(one != "none" for one in through):
        return None
    addresses = await asyncio.to_thread(network.resolve, name)
    renamed = name.lower() != host.rpartition("@")[2].lower()
    return Destination(addresses=tuple(addresses), port=int(port), renamed=renamed)


async def look(way: Destination) -> Seen:
    """Go as far as one comes; it takes at most 5 s."""
    locals_ = {address: _local_end(address) for address in way.addresses}
    # As ssh does: an address to which there is no way is passed over.
    address = next((one for one in way.addresses if locals_[one]), way.addresses[0])
    knocked, other, answers_ping = await asyncio.gather(
        knock(address, way.port, within_s=_OPENED_WITHIN_S),
        knock(address, _UNUSED_PORT, within_s=_PINGED_WITHIN_S),
        _answers_ping(address),
    )
    card = await _neighbour(address)
    alive = ""
    if answers_ping:
        alive = "it answers ping"
    elif other.problem in ("", "refused"):
        alive = f"it answers at port {_UNUSED_PORT}"
    elif card == "REACHABLE" and knocked.problem:
        alive = "its network card answers"
    passing, frame_bytes = await _smaller(address, way.port, knocked)
    return Seen(
        address=address,
        port=way.port,
        knock=knocked,
        local=locals_[address],
        interface=leading_to(address, locals_[address], interfaces_here()),
        alive=alive,
        silent_card=card in ("FAILED", "INCOMPLETE"),
        passing=passing,
        frame_bytes=frame_bytes,
    )


def leading_to(address: str, local: str, known: Sequence[Interface]) -> Interface | None:
    """Return the interface for an address: one of its own network, else the one that is used.

    Of several with this network one that works is taken; without any, the way may lead elsewhere.
    """
    own = [one for one in known if _has_network_of(one, address)]
    used = [one for one in known if any(word.split("/")[0] == local for word in one.networks)]
    working = [one for one in own if one.connected]
    return next(iter([*(one for one in working if one in used), *working, *own, *used]), None)


def _has_network_of(interface: Interface, address: str) -> bool:
    wanted = ipaddress.ip_address(address)
    return any(wanted in ipaddress.ip_interface(one).network for one in interface.networks)


async def _smaller(address: str, port: int, big: Knock) -> tuple[Knock | None, int | None]:
    """Where a big packet did not arrive, return the biggest of the usual ones that does, with its frame."""
    if big.problem or big.arrived is not False or big.sent_bytes is None:
        return None, None
    tried = await asyncio.gather(
        *(knock(address, port, frame_bytes=size) for size in _FRAMES_BYTES)
    )
    for size, one in zip(_FRAMES_BYTES, tried, strict=True):
        if one.arrived and one.sent_bytes is not None and one.sent_bytes < big.sent_bytes:
            return one, size
    return None, None


def _local_end(address: str) -> str:
    """Return the address of this machine from which packets would go there; nothing is sent."""
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
    """Return the state in which the system knows the network card with this address; "" if it does not."""
    told = await _output(["ip", "neighbour", "show", "to", address])
    return (told or "").split()[-1] if (told or "").strip() else ""


async def _output(words: Sequence[str], *, within_s: float = _TOLD_WITHIN_S) -> str | None:
    """Return what a program prints; None if it is not there, fails or takes too long."""
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
