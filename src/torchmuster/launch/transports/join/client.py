"""The joining machine's side: connect to the host, verify its certificate, and join.

The addresses of the code are tried one after the other, the most likely first. The server must present the certificate
whose pin is in the code; nothing is sent before that. Temporary failures (host not started yet, too many connections) are
retried until the timeout, with progress messages; other failures raise an error immediately.
"""

import asyncio
import os
import platform
import random
import ssl
import time
from collections.abc import Callable, Mapping

import msgspec

from torchmuster import __version__
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.network import firewall
from torchmuster.launch.transports.join import certificate, messages
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Join, Refused, Welcome
from torchmuster.launch.transports.join.stream import READ_AHEAD_BYTES, MessageChannel, Stream
from torchmuster.redaction import printable

CONNECT_S = 3.0
# A host that accepted the connection is up, but may be busy.
ANSWER_S = 20.0
REPORT_EVERY_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0
_NEW_CODE = "use the code that muster run --join prints now"

HostChannel = MessageChannel[protocol.ToAgent]
# The addresses that were tried (``10.0.0.1:29399``), each with its error.
Problems = Mapping[str, Exception]


class WrongCertificateError(ConnectionError):
    """Raised where another program answers, or a host whose code is another one."""


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
    end_s = time.monotonic() + patience_s
    problems: dict[str, Exception] = {}

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            on_event(_progress_text(problems, name, end_s))

    reporting = asyncio.create_task(report())
    pause_s = _SHORTEST_PAUSE_S
    try:
        while True:
            is_first_round = not problems
            for address in (name,) if name else code.addresses:
                try:
                    return await _join_at(address, code, place, may_be_early=bool(name))
                except (OSError, TimeoutError, protocol.UnreadableMessage) as error:
                    problems[_host(address, code.port)] = error
            wrong = [isinstance(error, WrongCertificateError) for error in problems.values()]
            if all(wrong) and not name:
                raise _other_host(problems)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise _not_reached(problems, code.port, patience_s, name)
            if is_first_round:
                on_event(_progress_text(problems, name, end_s))
            # Random pause: machines that were rejected together should not retry together.
            await asyncio.sleep(min(left_s, random.uniform(pause_s / 2, pause_s)))
            pause_s = min(2 * pause_s, longest_pause_s)
    finally:
        reporting.cancel()


async def open_verified(address: str, port: int, pin: bytes) -> Stream:
    """Connect to an address, and verify the certificate of the server. Raises OSError or TimeoutError."""
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=READ_AHEAD_BYTES)
    stream = Stream(reader, writer)
    try:
        async with asyncio.timeout(ANSWER_S):
            await writer.start_tls(certificate.client_context(), server_hostname="")
        if not certificate.has_pin(stream.peer_certificate(), pin):
            raise WrongCertificateError("the certificate does not match the code")
    except BaseException:
        stream.abort("the host was not verified")
        raise
    return stream


async def _join_at(
    address: str, code: JoinCode, place: int | None, *, may_be_early: bool
) -> HostChannel:
    """Ask the host at one address to join; raise the error if it does not answer or refuses.

    ``may_be_early``: a refused code may be valid later.
    """
    stream = await open_verified(address, code.port, code.pin)
    join = Join(
        protocol=protocol.PROTOCOL,
        place=place,
        secret=code.secret,
        host=platform.node()[: messages.NAME_LIMIT],
        torchmuster=__version__,
    )
    try:
        await stream.send(msgspec.json.encode(join))
        async with asyncio.timeout(ANSWER_S):
            answer = await stream.receive(protocol.MESSAGE_LIMIT, messages.decode_answer)
    except BaseException:
        stream.abort("given up")
        raise
    if isinstance(answer, Welcome):
        host = _host(address, code.port)
        return MessageChannel(stream, protocol.decode_to_agent, host=host)
    await stream.close()
    if answer is None:
        raise ConnectionError("it accepts the connection, but does not answer")
    if may_be_early and answer.reason != "other-protocol":
        raise ConnectionError("it still waits for an earlier connection of this node to end")
    raise _not_let_in(answer)


def _host(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{port}"


def _lines(problems: Problems) -> list[str]:
    lines = []
    for host, error in problems.items():
        text = str(error)
        if isinstance(error, TimeoutError):
            text = "no answer in time"
        elif isinstance(error, ssl.SSLError):
            text = "the program there does not use TLS"
        elif isinstance(error, OSError) and error.errno is not None and error.errno > 0:
            text = os.strerror(error.errno).lower()
        lines.append(f"{host}: {text}")
    return lines


def _progress_text(problems: Problems, name: str, end_s: float) -> str:
    target = f"the launcher {name}" if name else "the host"
    tried = "; ".join(_lines(problems)) or "connecting"
    left_s = max(0.0, end_s - time.monotonic())
    return f"waiting for {target} ({tried}); trying for another {left_s:.0f} s"


def _not_let_in(refused: Refused) -> Impossible:
    what, fix = "the host does not know this join code", _NEW_CODE
    if refused.reason == "other-protocol":
        version = printable([refused.torchmuster])
        what = f"the host has torchmuster {version}, this machine has {__version__}"
        fix = f"pip install torchmuster=={version}  # then use the same code again"
    elif refused.reason == "no-place":
        what = "all machines of this run have joined already"
        fix = "start the run for more machines: muster run --join --nodes N"
    return Impossible(what, why=printable([refused.why]), fix=fix)


def _other_host(problems: Problems) -> MusterError:
    return MusterError(
        f"the server at {', '.join(problems)} is not the host of this join code",
        why="its certificate does not match the code: the run was started again after it printed the "
        "code, or the connection is intercepted; nothing was sent",
        fix=f"{_NEW_CODE}; if the error persists, do not trust this network",
    )


def _not_reached(problems: Problems, port: int, patience_s: float, name: str) -> MusterError:
    why = "\n".join(_lines(problems))
    if name:
        return MusterError(
            f"the launcher {name} did not accept this node within {patience_s:g} s",
            why=why,
            fix="look at the first node: it runs the launcher",
        )
    return MusterError(
        f"cannot reach the host within {patience_s:g} s",
        why=why,
        fix=f"if the run has ended, start it again and use its new code; else, on the host:\n"
        f"{firewall.open_command_anywhere(port)}",
    )
