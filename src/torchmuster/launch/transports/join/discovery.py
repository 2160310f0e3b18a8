"""Finding the host on the local network without an address: multicast DNS (zeroconf).

The host announces an id that follows from its certificate's fingerprint; whoever has the code can
compute it, and nobody can compute the code from it. What is found this way is a guess at an address
and no more: the certificate is what the host is known by. Multicast reaches the local network only.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join.listener import reachable

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

SERVICE_TYPE = "_torchmuster._tcp.local."


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where the host says it is."""

    addresses: tuple[str, ...]
    port: int


def announced_id(fingerprint: bytes) -> str:
    """Return the opaque name under which the host with this certificate announces itself."""
    return hashlib.sha256(b"torchmuster join\0" + fingerprint).hexdigest()[:24]


async def announce(fingerprint: bytes, *, port: int, addresses: Sequence[str]) -> None:
    """Announce the host at these addresses until cancelled; it is taken back then."""
    outside = reachable(addresses)
    multicast = _multicast(outside)
    from zeroconf import ServiceInfo

    name = announced_id(fingerprint)
    service = ServiceInfo(
        SERVICE_TYPE,
        f"{name}.{SERVICE_TYPE}",
        port=port,
        parsed_addresses=[one.partition("%")[0] for one in outside],
        server=f"{name}.local.",
    )
    try:
        # The name is ours alone, so there is no need to ask first whether somebody has it.
        await multicast.async_register_service(service, cooperating_responders=True)
        await asyncio.get_running_loop().create_future()  # until cancelled
    finally:
        await multicast.async_unregister_all_services()
        await multicast.async_close()


async def find(fingerprint: bytes, *, timeout_s: float) -> Found | None:
    """Look for the host with this certificate; None if it does not answer in time."""
    multicast = _multicast(None)
    from zeroconf.asyncio import AsyncServiceInfo

    service = AsyncServiceInfo(SERVICE_TYPE, f"{announced_id(fingerprint)}.{SERVICE_TYPE}")
    try:
        if not await service.async_request(multicast.zeroconf, timeout_s * 1000):
            return None
        addresses = tuple(service.parsed_scoped_addresses())
        return Found(addresses=addresses, port=service.port) if service.port else None
    finally:
        await multicast.async_close()


def _multicast(addresses: Sequence[str] | None) -> "AsyncZeroconf":
    """Join the multicast groups on the interfaces of these addresses, or on all."""
    try:
        from zeroconf import InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncZeroconf
    except ImportError as error:
        raise Impossible(
            "the host cannot be looked for: the package zeroconf is not installed here",
            why="this is how machines on one local network find each other without addresses",
            fix="pip install 'torchmuster[join]'",
        ) from error
    if addresses is not None:
        return AsyncZeroconf(interfaces=list(addresses))
    try:
        return AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.All)
    except OSError:  # no IPv6 on this machine
        return AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
