"""Call other hosts: test the connection, or measure the link."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from torchmuster.diagnose.links import measure, serve
from torchmuster.diagnose.links.messages import (
    Call,
    Called,
    Result,
    Target,
    encode_message,
    read_message,
)
from torchmuster.diagnose.links.model import DROPPED
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network import reach
from torchmuster.launch.network.interfaces import Interface

# A firewall rejects at once; the kernel reports an absent host after 3 s.
_AT_ONCE_S = 0.7


async def call(argument: Any) -> Any:
    """Call all targets in parallel, or measure the links to them one after the other."""
    asked = read_message(Call, argument)
    known = network_interfaces.read_interfaces()
    if asked.measure:
        results = [await _measure(target, asked, known) for target in asked.targets]
    else:
        tries = (_reach(target, asked, known) for target in asked.targets)
        results = list(await asyncio.gather(*tries))
    return encode_message(Called(results=tuple(results)))


async def _reach(target: Target, asked: Call, known: Sequence[Interface]) -> Result:
    result, connection = await _connect(target, asked, known)
    if connection is not None:
        connection.close()
    return result


async def _measure(target: Target, asked: Call, known: Sequence[Interface]) -> Result:
    result, connection = await _connect(target, asked, known)
    if connection is None or result.local is None:
        return result
    waiting = [connection]

    async def reconnect() -> socket.socket:
        if waiting:
            return waiting.pop()
        again, other = await _connect(target, asked, known)
        if other is None:
            raise ConnectionError(again.problem)
        return other

    try:
        there, back = await measure.measure_link(
            target,
            asked.nonce,
            reconnect=reconnect,
            local=result.local,
            own_frame_bytes=_frame_bytes(result.local.interface),
            datagram_count=asked.datagrams,
        )
    except TimeoutError:  # may be caused by a busy host
        return Result(problem="timeout", seconds=result.seconds, local=result.local)
    except OSError:
        return Result(problem=DROPPED, seconds=result.seconds, local=result.local)
    finally:
        for one in waiting:
            one.close()
    return Result(problem="", seconds=result.seconds, local=result.local, there=there, back=back)


async def _connect(
    target: Target, asked: Call, known: Sequence[Interface]
) -> tuple[Result, socket.socket | None]:
    found, connection = await reach.connect_to(
        protocol.Target(address=target.address, port=target.port),
        asked.nonce,
        timeout_s=asked.timeout_s,
        interfaces=known,
    )
    problem = found.problem
    if problem == "unreachable" and not _has_route(target.address):
        problem = "no-route"
    elif problem == "unreachable":
        problem = "prohibited" if found.seconds < _AT_ONCE_S else "absent"
    return Result(problem=problem, seconds=found.seconds, local=found.local), connection


def _has_route(address: str) -> bool:
    """Return whether this host has a route to an address, without sending a packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
        except OSError:
            return False
    return True


def _frame_bytes(interface: str) -> int | None:
    return next((one.frame_bytes for one in serve.interfaces_here() if one.name == interface), None)
