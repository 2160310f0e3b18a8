"""The joining machine's side: connect to the host, verify its certificate, and join.

All addresses are tried concurrently. The server must present the certificate whose fingerprint is in the
code; nothing is sent before that. Temporary failures (host not started yet, too many connections) are
retried until the timeout, with progress messages; other failures raise an error immediately.
"""

import asyncio
import errno
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
from torchmuster.launch.transports.join import certificate, messages
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Join, Refused, Welcome
from torchmuster.launch.transports.join.stream import Stream, open_stream
from torchmuster.redaction import printable

CONNECT_S = 3.0
# A host that accepted the connection is up, but may be busy.
HANDSHAKE_S = 20.0

# timeout: no answer at all; refused: the machine is up, the port is closed; unreachable: no route;
# stranger: another certificate; not-tls: another program listens there; silent: accepts the connection
# and sends nothing; turned-away: closed without an answer; taken: the place still belongs to an earlier connection.
Kind = Literal[
    "timeout", "refused", "unreachable", "stranger", "not-tls", "silent", "turned-away", "taken"
]

_IN_WORDS: dict[Kind, str] = {
    "timeout": f"no answer within {CONNECT_S:g} s",
    "refused": "connection refused",
    "unreachable": "no route",
    "stranger": "the certificate does not match the code",
    "not-tls": "the program there does not use TLS",
    "silent": "accepts the connection, but does not answer",
    "turned-away": "closed by the other side",
    "taken": "it still waits for an earlier connection of this node to end",
}


@dataclass(frozen=True, kw_only=True)
class JoinTarget:
    """An address and port at which the host may be."""

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
    """Return the first connection to the host with this certificate, or the problems of all addresses."""
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
            handshake_s=max(1.0, min(HANDSHAKE_S, patience_s)),
        )
    except OSError as error:
        return JoinProblem(target=target, kind=_client_kind(error))
    if not certificate.is_known(stream.peer_certificate(), fingerprint):
        stream.abort("the certificate does not match the code")
        return JoinProblem(target=target, kind="stranger")
    return stream, target


async def _connected(target: JoinTarget) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        target.address, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    # asyncio sets TCP_NODELAY only if the socket's protocol is given as TCP.
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
    if isinstance(error, ConnectionAbortedError):  # asyncio's error for a handshake timeout
        return "silent"
    if isinstance(error, ConnectionError):
        return "turned-away"
    return "unreachable"


ANSWER_S = 10.0
TELL_EVERY_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0


class HostChannel:
    """The node agent's end of the connection to the launcher; ``host`` is the launcher's address."""

    def __init__(self, stream: Stream, host: JoinTarget) -> None:
        self._stream = stream
        self.host = host

    async def send(self, message: protocol.FromAgent) -> None:
        """Send a message; on a closed channel this does nothing."""
        await self._stream.send(protocol.encode(message))

    async def receive(self) -> protocol.ToAgent | None:
        """Return the next message, or None when the host is gone. Raises ``UnreadableMessage``."""
        return await self._stream.receive(protocol.MESSAGE_LIMIT, protocol.decode_to_agent)

    def why_closed(self) -> str:
        """Return the known cause after ``receive`` returned None."""
        return self._stream.why_closed

    async def close(self) -> None:
        """Close the connection; the host declares this machine lost."""
        await self._stream.close()


async def connect_to_host(
    code: JoinCode,
    *,
    on_event: Callable[[str], None],
    open_firewall: Callable[[int], str],
    place: int | None = None,
    patience_s: float = 120.0,
    name: str = "",
    longest_pause_s: float = _LONGEST_PAUSE_S,
) -> HostChannel:
    """Join with this code; return once the host has accepted.

    ``on_event`` gets progress messages; ``open_firewall`` returns the command that opens a port in the
    host's firewall. ``place`` is for nodes that know theirs. ``name`` is the host's DNS name, for nodes that know the
    code before the host is up: its address may change, and what would be a wrong code may only be early.
    """
    targets = [JoinTarget(address=address, port=code.port) for address in code.addresses]
    pause_s = _SHORTEST_PAUSE_S
    with _Progress(on_event, patience_s) as progress:
        while True:
            if name:
                targets = await _resolve(name, code.port)
            outcome = await _try_all(code, targets, place, progress, early=bool(name))
            if isinstance(outcome, HostChannel):
                return outcome
            if not name and all(problem.kind == "stranger" for problem in outcome):
                raise _stranger(outcome)
            if progress.left_s <= 0:
                raise _unreachable(outcome, patience_s, open_firewall, name)
            progress.sets_back(_not_yet(outcome, name))
            # Random pause: machines that were rejected together should not retry together.
            await asyncio.sleep(min(progress.left_s, random.uniform(pause_s / 2, pause_s)))
            pause_s = min(2 * pause_s, longest_pause_s)


async def _resolve(name: str, port: int) -> list[JoinTarget]:
    """Return the current addresses of a DNS name; none if it has none yet."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = dict.fromkeys(str(where[0]) for *_, where in found)
    return [JoinTarget(address=address, port=port) for address in addresses]


class _Progress:
    """Print progress: at the first failure, and then every few seconds."""

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


async def _try_all(
    code: JoinCode,
    targets: Sequence[JoinTarget],
    place: int | None,
    progress: _Progress,
    *,
    early: bool,
) -> HostChannel | list[JoinProblem]:
    """Try every address once."""
    answered = await first_to_answer(targets, code.fingerprint, patience_s=progress.left_s)
    if isinstance(answered, list):
        return answered
    stream, target = answered
    progress.goes_on(f"connected to the host at {target}, waiting to be accepted")
    outcome = await _ask(stream, target, code, place, early=early)
    return outcome if isinstance(outcome, HostChannel) else [outcome]


async def _ask(
    stream: Stream, target: JoinTarget, code: JoinCode, place: int | None, *, early: bool
) -> HostChannel | JoinProblem:
    """Send the join request to the host, whose certificate has been verified.

    ``early``: a refused code may be valid later.
    """
    join = Join(
        protocol=protocol.PROTOCOL,
        place=place,
        secret=code.secret,
        host=platform.node()[: messages.NAME_LIMIT],
        torchmuster=__version__,
    )
    try:
        await stream.send(messages.encode_join_message(join))
        async with asyncio.timeout(ANSWER_S):
            answer = await stream.receive(protocol.MESSAGE_LIMIT, messages.decode_answer)
    except (TimeoutError, protocol.UnreadableMessage):
        answer = None
    except BaseException:
        stream.abort("given up")
        raise
    if isinstance(answer, Welcome):
        return HostChannel(stream, target)
    await stream.close()
    if isinstance(answer, Refused) and early and answer.reason != "other-protocol":
        return JoinProblem(target=target, kind="taken")
    if isinstance(answer, Refused):
        raise _not_let_in(answer)
    return JoinProblem(target=target, kind="turned-away")


def _not_let_in(refused: Refused) -> Impossible:
    why = printable([refused.why])
    if refused.reason == "other-protocol":
        version = printable([refused.torchmuster])
        return Impossible(
            f"the host has torchmuster {version}, this machine has {__version__}",
            why=why,
            fix=f"pip install torchmuster=={version}  # then use the same code again",
        )
    if refused.reason == "no-place":
        return Impossible(
            "all machines of this run have joined already",
            why=why,
            fix="start the run for more machines: muster run --join --nodes N",
        )
    return Impossible(
        "the host does not know this join code",
        why=why,
        fix="use the code that muster run --join prints now",
    )


def _stranger(problems: Iterable[JoinProblem]) -> MusterError:
    where = ", ".join(str(problem.target) for problem in problems)
    return MusterError(
        f"the server at {where} is not the host of this join code",
        why="its certificate does not match the code: the run was started again after it printed the "
        "code, or the connection is intercepted; nothing was sent",
        fix="use the code that muster run --join prints now; if the error persists, do not trust this network",
    )


def _not_yet(problems: Iterable[JoinProblem], name: str) -> str:
    tried = "; ".join(str(problem) for problem in problems)
    if name:
        return f"waiting for the launcher {name} ({tried or 'the name has no address yet'})"
    return f"the host is not reachable yet ({tried})"


def _unreachable(
    problems: Sequence[JoinProblem],
    patience_s: float,
    open_firewall: Callable[[int], str],
    name: str,
) -> MusterError:
    if name:
        return MusterError(
            f"the launcher {name} did not accept this node within {patience_s:g} s",
            why="\n".join(str(problem) for problem in problems) or "the name has no address",
            fix="look at the first node: it runs the launcher",
        )
    kinds = {problem.kind for problem in problems}
    if kinds & {"silent", "turned-away"}:
        meaning = "the host is up but overloaded, or a proxy or firewall intercepts the connection"
        fix = "use the same code again; if the error persists, check the output of muster run"
    elif kinds <= {"refused"}:
        meaning = "the machine is up but the port is closed: the run has ended or its port changed"
        fix = "start the run again and use its new code"
    elif kinds & {"timeout", "unreachable", "refused"}:
        meaning = (
            "a firewall blocks the connection, the networks are not connected, or the host is off"
        )
        commands = {open_firewall(problem.target.port): None for problem in problems}
        fix = "\n".join(["on the host:", *commands])
    else:
        meaning = "another program answers, not the host that printed this code"
        fix = "use the code that muster run --join prints now"
    return MusterError(
        f"cannot reach the host within {patience_s:g} s",
        why="\n".join([*(str(problem) for problem in problems), meaning]),
        fix=fix,
    )
