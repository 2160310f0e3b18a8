"""Trying several addresses of the host at once, and taking the first at which the host itself answers.

Nothing is sent to anybody whose certificate is not the one that the code names.
"""

import asyncio
import errno
import math
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.launch.transports.join import certificate
from torchmuster.launch.transports.join.stream import Stream, open_stream

CONNECT_S = 3.0
# Whoever is connected is there, and may have many to attend to.
HANDSHAKE_S = 20.0

# timeout: no answer at all; refused: the machine is there, the port is closed; unreachable: the
# network says there is no way; stranger: another certificate; not-tls: something else listens there;
# silent: takes the connection and says nothing; turned-away: closed without an answer.
Kind = Literal["timeout", "refused", "unreachable", "stranger", "not-tls", "silent", "turned-away"]

_IN_WORDS: dict[Kind, str] = {
    "timeout": f"no answer within {CONNECT_S:g} s",
    "refused": "connection refused",
    "unreachable": "no way there",
    "stranger": "another certificate",
    "not-tls": "something there that does not speak TLS",
    "silent": "takes the connection, but does not answer",
    "turned-away": "closed by the other side",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the host may be."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why the host was not reached at one of its addresses."""

    target: Target
    kind: Kind

    def __str__(self) -> str:
        return f"{self.target}: {_IN_WORDS[self.kind]}"


async def first_to_answer(
    targets: Sequence[Target], fingerprint: bytes, *, patience_s: float
) -> tuple[Stream, Target] | list[Problem]:
    """Return the first connection to the host with this certificate, or what went wrong everywhere."""
    tries = {asyncio.create_task(_try(target, fingerprint, patience_s)) for target in targets}
    problems: list[Problem] = []
    try:
        while tries:
            done, tries = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [task.result() for task in done]
            streams = [one for one in outcomes if not isinstance(one, Problem)]
            for stream, _ in streams[1:]:
                stream.abort("another address was faster")
            if streams:
                return streams[0]
            problems += [one for one in outcomes if isinstance(one, Problem)]
        return sorted(problems, key=lambda problem: targets.index(problem.target))
    finally:
        for task in tries:
            task.cancel()
        for late in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(late, tuple):
                late[0].abort("another address was faster")


async def _try(
    target: Target, fingerprint: bytes, patience_s: float
) -> tuple[Stream, Target] | Problem:
    try:
        async with asyncio.timeout(CONNECT_S):
            connected = await _connected(target)
        stream = await open_stream(
            connected,
            certificate.client_context(),
            server_side=False,
            handshake_s=math.ceil(max(1.0, min(HANDSHAKE_S, patience_s))),
        )
    except OSError as error:
        return Problem(target=target, kind=_kind(error))
    if not certificate.is_known(stream.peer_certificate(), fingerprint):
        stream.abort("another certificate")
        return Problem(target=target, kind="stranger")
    return stream, target


async def _connected(target: Target) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        target.address, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    # asyncio sends small messages at once (TCP_NODELAY) only if it is told that this is TCP.
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, where)
    except BaseException:
        made.close()
        raise
    return made


def _kind(error: OSError) -> Kind:
    if isinstance(error, ssl.SSLError):
        return "not-tls"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(
        error, ConnectionAbortedError
    ):  # what asyncio calls a handshake that takes too long
        return "silent"
    if isinstance(error, ConnectionError):
        return "turned-away"
    return "unreachable"
