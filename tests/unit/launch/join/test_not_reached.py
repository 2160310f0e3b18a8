"""What a joining machine reports when the host is not there, not reachable, or refuses."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from torchmuster.errors import MusterError
from torchmuster.launch.transports.join import client
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Reason, Refused
from torchmuster.launch.transports.join.stream import Stream
from unit.launch.join.open_host import LOOPBACK, Host, join, with_host


def code_for(port: int, *addresses: str) -> JoinCode:
    return JoinCode(port=port, addresses=addresses, secret=os.urandom(16), pin=os.urandom(16))


@contextlib.asynccontextmanager
async def nobody() -> AsyncIterator[int]:
    """A port at which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


@contextlib.asynccontextmanager
async def web_server() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, LOOPBACK, 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("server", "name", "problem", "fix"),
    [
        (nobody, "", "connection refused", "use its new code"),
        (nobody, LOOPBACK, "connection refused", "look at the first node"),
        (web_server, "", "does not use TLS", "sudo ufw allow"),
    ],
)
def test_a_host_that_is_not_there_is_reported_with_its_address(
    server: Callable[[], contextlib.AbstractAsyncContextManager[int]],
    name: str,
    problem: str,
    fix: str,
) -> None:
    events: list[str] = []

    async def scene() -> None:
        async with server() as port:
            where.append(f"127.0.0.1:{port}: ")
            await join(code_for(port, LOOPBACK), events=events, patience_s=0.5, name=name)

    where: list[str] = []
    with pytest.raises(MusterError) as caught:
        asyncio.run(scene())
    assert where[0] in events[0]
    assert caught.value.why.startswith(where[0])
    assert problem in caught.value.why
    assert fix in caught.value.fix


def test_the_host_may_come_later_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = client.open_verified
    tries = 0

    async def nobody_at_first(address: str, port: int, pin: bytes) -> Stream:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionRefusedError
        return await real(address, port, pin)

    monkeypatch.setattr(client, "open_verified", nobody_at_first)

    async def scene(host: Host) -> None:
        machine = await join(host.code)
        assert tries == 2
        await machine.close()

    with_host(scene)


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("no-place", "muster run --join --nodes N"),
        ("wrong-code", "muster run --join"),
        ("other-protocol", "pip install torchmuster==9.1� "),
    ],
)
def test_each_refusal_has_its_fix(reason: Reason, fix: str) -> None:
    answer = Refused(reason=reason, why="why", protocol=2, torchmuster="9.1\x1b")
    error = client._not_let_in(answer)
    assert fix in error.fix
    assert error.why == "why"
