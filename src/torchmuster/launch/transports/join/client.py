"""The joining machine's side: find the host, make sure that it is the host, and be let in.

All addresses are tried at once. Whoever answers must show the certificate whose fingerprint the code
has; before that nothing is sent. What can pass by itself (nobody there yet, a crowded door) is tried
again until the patience is over, and said in plain words meanwhile; what cannot is an error at once.
"""

import asyncio
import errno
import math
import platform
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster import __version__
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.transports.join import certificate, listener, token_registry
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.stream import Stream, open_stream
from torchmuster.launch.transports.join.token_registry import Join, Refused
from torchmuster.redaction import printable

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
class JoinTarget:
    """Where the host may be."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class JoinProblem:
    """Why the host was not reached at one of its addresses."""

    target: JoinTarget
    kind: Kind

    def __str__(self) -> str:
        return f"{self.target}: {_IN_WORDS[self.kind]}"


async def first_to_answer(
    targets: Sequence[JoinTarget], fingerprint: bytes, *, patience_s: float
) -> tuple[Stream, JoinTarget] | list[JoinProblem]:
    """Return the first connection to the host with this certificate, or what went wrong everywhere."""
    tries = {asyncio.create_task(_try(target, fingerprint, patience_s)) for target in targets}
    problems: list[JoinProblem] = []
    try:
        while tries:
            done, tries = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [task.result() for task in done]
            streams = [one for one in outcomes if not isinstance(one, JoinProblem)]
            for stream, _ in streams[1:]:
                stream.abort("another address was faster")
            if streams:
                return streams[0]
            problems += [one for one in outcomes if isinstance(one, JoinProblem)]
        return sorted(problems, key=lambda problem: targets.index(problem.target))
    finally:
        for task in tries:
            task.cancel()
        for late in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(late, tuple):
                late[0].abort("another address was faster")


async def _try(
    target: JoinTarget, fingerprint: bytes, patience_s: float
) -> tuple[Stream, JoinTarget] | JoinProblem:
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
        return JoinProblem(target=target, kind=_client_kind(error))
    if not certificate.is_known(stream.peer_certificate(), fingerprint):
        stream.abort("another certificate")
        return JoinProblem(target=target, kind="stranger")
    return stream, target


async def _connected(target: JoinTarget) -> socket.socket:
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


def _client_kind(error: OSError) -> Kind:
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


FIND_S = 3.0
ANSWER_S = 10.0
TELL_EVERY_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0


class HostChannel:
    """The node agent's end of the connection to the launcher; ``host`` is where that was reached."""

    def __init__(self, stream: Stream, host: JoinTarget) -> None:
        self._stream = stream
        self.host = host

    async def send(self, message: protocol.FromAgent) -> None:
        """Send a message; on a closed channel this does nothing."""
        await self._stream.send(protocol.encode(message))

    async def receive(self) -> protocol.ToAgent | None:
        """Return the next message, or None when the host has gone. Raises ``wire.Garbled``."""
        return await self._stream.receive(protocol.MESSAGE_LIMIT, protocol.decode_to_agent)

    def why_closed(self) -> str:
        """Say, after ``receive`` gave None, what is known of the cause."""
        return self._stream.why_closed

    async def close(self) -> None:
        """Let go; the host takes this machine for gone."""
        await self._stream.close()


async def connect_to_host(
    code: JoinCode,
    *,
    on_event: Callable[[str], None],
    open_firewall: Callable[[int], str],
    discover: bool = True,
    patience_s: float = 120.0,
) -> HostChannel:
    """Join with this code; returns once the host has said welcome.

    ``on_event`` is told in plain words why it takes time; ``open_firewall`` gives the command that
    lets a port through the host's firewall.
    """
    if not code.addresses and not discover:
        raise Impossible(
            "this code has no address of the host",
            why="with a short code the host is looked for on the local network, which was turned off",
            fix="use the long code that muster host printed",
        )
    targets = [JoinTarget(address=address, port=code.port) for address in code.addresses]
    pause_s = _SHORTEST_PAUSE_S
    # Others on the network are bothered only if the addresses in the code were of no use.
    look = not targets
    with _Progress(on_event, patience_s) as progress:
        while True:
            outcome, found = await _round(code, targets, look=look, progress=progress)
            if isinstance(outcome, HostChannel):
                return outcome
            new = [target for target in found if target not in targets]
            targets += new
            if new and progress.left_s > 0:
                continue
            looked = look or not discover
            if looked and outcome and all(problem.kind == "stranger" for problem in outcome):
                raise _stranger(outcome)
            if progress.left_s <= 0:
                raise _unreachable(outcome, patience_s, open_firewall)
            progress.sets_back(_not_yet(outcome))
            look = discover
            # Many machines that were turned away together should not come back together.
            await asyncio.sleep(min(progress.left_s, random.uniform(pause_s / 2, pause_s)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Progress:
    """Tells how things stand: at the first setback, and then every few seconds whatever happens."""

    def __init__(self, tell: Callable[[str], None], patience_s: float) -> None:
        self._tell = tell
        self._end_s = time.monotonic() + patience_s
        self._state = "looking for the host"
        self._told = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "_Progress":
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def goes_on(self, state: str) -> None:
        self._state = state

    def sets_back(self, state: str) -> None:
        self._state = state
        if not self._told:
            self._say()

    def _say(self) -> None:
        self._told = True
        self._tell(f"{self._state}; trying for another {max(0, self.left_s):.0f} s")

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TELL_EVERY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._say()
        self._wait()


async def _round(
    code: JoinCode, targets: Sequence[JoinTarget], *, look: bool, progress: _Progress
) -> tuple[HostChannel | list[JoinProblem], list[JoinTarget]]:
    """Try every address once, and meanwhile look for more of them."""
    looking = asyncio.create_task(_look_for(code)) if look else None
    try:
        answered: tuple[Stream, JoinTarget] | list[JoinProblem] = []
        if targets:
            answered = await first_to_answer(targets, code.fingerprint, patience_s=progress.left_s)
        if isinstance(answered, list):
            return answered, await looking if looking else []
        progress.goes_on(f"the host answers at {answered[1]}, waiting to be let in")
        outcome = await _ask(*answered, code)
        return outcome if isinstance(outcome, HostChannel) else [outcome], []
    finally:
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def _look_for(code: JoinCode) -> list[JoinTarget]:
    try:
        found = await listener.find_hosts(code.fingerprint, timeout_s=FIND_S)
    except Impossible:  # zeroconf is not installed
        if not code.addresses:
            raise
        return []
    except OSError:  # no network yet
        return []
    if found is None:
        return []
    return [JoinTarget(address=address, port=found.port) for address in found.addresses]


async def _ask(stream: Stream, target: JoinTarget, code: JoinCode) -> HostChannel | JoinProblem:
    """Ask the host, which is known by now, to be let in."""
    join = Join(
        protocol=protocol.PROTOCOL,
        place=code.place,
        token=code.token,
        host=platform.node()[: token_registry.NAME_LIMIT],
        torchmuster=__version__,
    )
    try:
        await stream.send(token_registry.encode_join_message(join))
        async with asyncio.timeout(ANSWER_S):
            answer = await stream.receive(protocol.MESSAGE_LIMIT, token_registry.decode_answer)
    except (TimeoutError, protocol.UnreadableMessage):
        answer = None
    except BaseException:
        stream.abort("given up")
        raise
    if isinstance(answer, token_registry.Welcome):
        return HostChannel(stream, target)
    await stream.close()
    if isinstance(answer, Refused):
        raise _not_let_in(answer)
    return JoinProblem(target=target, kind="turned-away")


def _not_let_in(sorry: Refused) -> Impossible:
    why = printable([sorry.why])
    if sorry.reason == "other-protocol":
        version = printable([sorry.torchmuster])
        return Impossible(
            f"the host has torchmuster {version}, this machine has {__version__}",
            why=why,
            fix=f"pip install torchmuster=={version}  # then use the same code again",
        )
    if sorry.reason == "used-code":
        return Impossible(
            "this join code was used before",
            why=f"{why}; a code lets one machine in, once",
            fix="use a code that muster host shows as still waiting",
        )
    return Impossible(
        "the host does not know this join code",
        why=f"{why}; a code is worth nothing once its place has been given a new one",
        fix="use a code that muster host shows as still waiting",
    )


def _stranger(problems: Iterable[JoinProblem]) -> MusterError:
    where = ", ".join(str(problem.target) for problem in problems)
    return MusterError(
        f"someone else than the host answers at {where}",
        why="the certificate is not the one that the code names: either the host was started anew "
        "since the code was printed, or somebody is in between; nothing was sent",
        fix="use a code that muster host shows now; if this stays, do not trust this network",
    )


def _not_yet(problems: Iterable[JoinProblem]) -> str:
    tried = "; ".join(str(problem) for problem in problems)
    if not tried:
        return "the host is not found on the local network yet"
    return f"the host is not reachable yet ({tried})"


def _unreachable(
    problems: Sequence[JoinProblem], patience_s: float, open_firewall: Callable[[int], str]
) -> MusterError:
    if not problems:
        return MusterError(
            f"no host with this code was found on the local network in {patience_s:g} s",
            why="the host has ended, or is on another network, or multicast is blocked (UDP 5353)",
            fix="use the long code that muster host printed: it has the host's addresses",
        )
    kinds = {problem.kind for problem in problems}
    if kinds & {"silent", "turned-away"}:
        meaning = "the host is there but has too many to attend to, or something stands in between"
        fix = "use the same code again; if it stays so, look at what muster host says"
    elif kinds <= {"refused"}:
        meaning = (
            "the machine is there but nobody listens: has the host ended, or its port changed?"
        )
        fix = "start muster host again and use the new code"
    elif kinds & {"timeout", "unreachable", "refused"}:
        meaning = "a firewall is in between, or the networks are not connected, or the host is off"
        commands = {open_firewall(problem.target.port): None for problem in problems}
        fix = "\n".join(["on the host:", *commands])
    else:
        meaning = "something is there, but not the host that printed this code"
        fix = "use a code that muster host shows now"
    return MusterError(
        f"the host was not reached in {patience_s:g} s",
        why="\n".join([*(str(problem) for problem in problems), meaning]),
        fix=fix,
    )
