"""The joining machine's side: connect to the host, verify its certificate, and join.

All addresses are tried concurrently. The server must present the certificate whose pin is in the code; nothing is
sent before that. Temporary failures (host not started yet, too many connections) are retried until the timeout,
with progress messages; other failures raise an error immediately.
"""

import asyncio
import enum
import platform
import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from torchmuster import __version__
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.network import firewall
from torchmuster.launch.transports.join import certificate, messages
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Join, Refused, Welcome
from torchmuster.launch.transports.join.stream import MessageChannel, Stream, open_stream
from torchmuster.redaction import printable

CONNECT_S = 3.0
# A host that accepted the connection is up, but may be busy.
ANSWER_S = 20.0
REPORT_EVERY_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0


class Problem(enum.Enum):
    """Why the host was not joined at one of its addresses, as a user reads it."""

    TIMEOUT = f"no answer within {CONNECT_S:g} s"
    REFUSED = "connection refused"
    NO_ROUTE = "no route"
    OTHER_HOST = "the certificate does not match the code"
    NOT_TLS = "the program there does not use TLS"
    UNANSWERED = "it accepts the connection, but does not answer"
    TAKEN = "it still waits for an earlier connection of this node to end"


# The addresses that were tried (``10.0.0.1:29399``), each with its problem.
Problems = Mapping[str, Problem]


HostChannel = MessageChannel[protocol.ToAgent]


async def connect_to_host(
    code: JoinCode,
    *,
    on_event: Callable[[str], None],
    place: int | None = None,
    patience_s: float = 120.0,
    name: str = "",
    longest_pause_s: float = _LONGEST_PAUSE_S,
) -> HostChannel:
    """Join with this code; return once the host has accepted.

    ``on_event`` gets progress messages. ``place`` is for nodes that know theirs. ``name`` is the host's DNS name, for
    nodes that know the code before the host is up: its address may change, and what would be a wrong code may only be
    early.
    """
    waiting = _Waiting(on_event, patience_s)
    reminding = asyncio.create_task(waiting.remind())
    pause_s = _SHORTEST_PAUSE_S
    try:
        while True:
            addresses = await _resolve(name, code.port) if name else code.addresses
            first = await first_to_answer(addresses, code.port, code.pin)
            if isinstance(first, tuple):
                waiting.state = f"connected to the host at {first[1]}, waiting to be accepted"
                result = await _ask(*first, code.secret, place, early=bool(name))
                if isinstance(result, MessageChannel):
                    return result
                problems = result
            else:
                problems = first
            if not name and set(problems.values()) == {Problem.OTHER_HOST}:
                raise _other_host(problems)
            if waiting.left_s <= 0:
                raise _not_reached(problems, code.port, patience_s, name)
            waiting.failed(_not_yet(problems, name))
            # Random pause: machines that were rejected together should not retry together.
            await asyncio.sleep(min(waiting.left_s, random.uniform(pause_s / 2, pause_s)))
            pause_s = min(2 * pause_s, longest_pause_s)
    finally:
        reminding.cancel()


async def first_to_answer(
    addresses: Sequence[str], port: int, pin: bytes
) -> tuple[Stream, str] | Problems:
    """Return the first connection to the host with this certificate and its address, or all problems."""
    tries = {asyncio.create_task(_connect(address, port, pin)): address for address in addresses}
    problems = {_shown(address, port): Problem.UNANSWERED for address in addresses}
    try:
        pending = set(tries)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                host = _shown(tries[attempt], port)
                result = attempt.result()
                if isinstance(result, Stream):
                    del tries[attempt]  # it is kept
                    return result, host
                problems[host] = result
        return problems
    finally:
        for attempt in tries:
            attempt.cancel()
        for late in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(late, Stream):
                late.abort("another address was faster")


async def _connect(address: str, port: int, pin: bytes) -> Stream | Problem:
    """Connect to one address, and verify the certificate of the server."""
    problem = Problem.TIMEOUT  # what a timeout means at this point
    try:
        async with asyncio.timeout(CONNECT_S):
            connected = await _connected(address, port)
        problem = Problem.UNANSWERED
        stream = await open_stream(connected, certificate.client_context(), ANSWER_S)
    except ssl.SSLError:
        return Problem.NOT_TLS
    except TimeoutError:
        return problem
    except ConnectionRefusedError:
        return Problem.REFUSED
    except ConnectionError:  # also asyncio's error for a handshake that takes too long
        return Problem.UNANSWERED
    except OSError:
        return Problem.NO_ROUTE
    if certificate.has_pin(stream.peer_certificate(), pin):
        return stream
    stream.abort("the certificate does not match the code")
    return Problem.OTHER_HOST


async def _connected(address: str, port: int) -> socket.socket:
    family, kind, number, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    # asyncio sets TCP_NODELAY only if the socket's protocol is given as TCP.
    made = socket.socket(family, kind, number)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, where)
    except BaseException:
        made.close()
        raise
    return made


async def _ask(
    stream: Stream, host: str, secret: bytes, place: int | None, *, early: bool
) -> HostChannel | Problems:
    """Send the join request to the host, whose certificate has been verified.

    ``early``: a refused code may be valid later.
    """
    join = Join(
        protocol=protocol.PROTOCOL,
        place=place,
        secret=secret,
        host=platform.node()[: messages.NAME_LIMIT],
        torchmuster=__version__,
    )
    try:
        await stream.send(msgspec.json.encode(join))
        async with asyncio.timeout(ANSWER_S):
            answer = await stream.receive(protocol.MESSAGE_LIMIT, messages.decode_answer)
    except (TimeoutError, protocol.UnreadableMessage):
        answer = None
    except BaseException:
        stream.abort("given up")
        raise
    if isinstance(answer, Welcome):
        return MessageChannel(stream, protocol.decode_to_agent, host=host)
    await stream.close()
    if answer is None:
        return {host: Problem.UNANSWERED}
    if early and answer.reason != "other-protocol":
        return {host: Problem.TAKEN}
    raise _not_let_in(answer)


async def _resolve(name: str, port: int) -> Sequence[str]:
    """Return the current addresses of a DNS name; none if it has none yet."""
    try:
        results = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    addresses = dict.fromkeys(str(where[0]) for *_, where in results)
    return tuple(addresses)


def _shown(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{port}"


class _Waiting:
    """Reports what is being waited for: at the first failure, and then every few seconds."""

    def __init__(self, on_event: Callable[[str], None], patience_s: float) -> None:
        self.state = "looking for the host"
        self._on_event = on_event
        self._end_s = time.monotonic() + patience_s
        self._reported = False

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def failed(self, state: str) -> None:
        self.state = state
        if not self._reported:
            self._report()

    async def remind(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._report()

    def _report(self) -> None:
        self._reported = True
        self._on_event(f"{self.state}; trying for another {max(0, self.left_s):.0f} s")


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


def _other_host(problems: Problems) -> MusterError:
    return MusterError(
        f"the server at {', '.join(problems)} is not the host of this join code",
        why="its certificate does not match the code: the run was started again after it printed the "
        "code, or the connection is intercepted; nothing was sent",
        fix="use the code that muster run --join prints now; if the error persists, do not trust this network",
    )


def _lines(problems: Problems) -> list[str]:
    return [f"{host}: {problem.value}" for host, problem in problems.items()]


def _not_yet(problems: Problems, name: str) -> str:
    tried = "; ".join(_lines(problems))
    if name:
        return f"waiting for the launcher {name} ({tried or 'the name has no address yet'})"
    return f"the host is not reachable yet ({tried})"


def _not_reached(problems: Problems, port: int, patience_s: float, name: str) -> MusterError:
    if name:
        return MusterError(
            f"the launcher {name} did not accept this node within {patience_s:g} s",
            why="\n".join(_lines(problems)) or "the name has no address",
            fix="look at the first node: it runs the launcher",
        )
    kinds = set(problems.values())
    if kinds == {Problem.REFUSED}:
        meaning = "the machine is up but the port is closed: the run has ended or its port changed"
        fix = "start the run again and use its new code"
    elif Problem.UNANSWERED in kinds:
        meaning = "the host is up but overloaded, or a proxy or firewall intercepts the connection"
        fix = "use the same code again; if the error persists, check the output of muster run"
    elif kinds & {Problem.TIMEOUT, Problem.NO_ROUTE, Problem.REFUSED}:
        meaning = (
            "a firewall blocks the connection, the networks are not connected, or the host is off"
        )
        fix = f"on the host:\n{firewall.open_command_anywhere(port)}"
    else:
        meaning = "another program answers, not the host that printed this code"
        fix = "use the code that muster run --join prints now"
    return MusterError(
        f"cannot reach the host within {patience_s:g} s",
        why="\n".join([*_lines(problems), meaning]),
        fix=fix,
    )
