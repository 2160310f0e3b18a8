"""What a joining machine reports when the host is not there, not reachable, or somebody else."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster import __version__
from torchmuster.errors import MusterError
from torchmuster.launch.transports.join import client
from torchmuster.launch.transports.join.client import Problem
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Reason, Refused
from unit.launch.join.open_host import LOOPBACK, Host, join, with_host


def code_for(port: int, *addresses: str) -> JoinCode:
    return JoinCode(port=port, addresses=addresses, secret=os.urandom(16), pin=os.urandom(16))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


def test_a_host_that_is_not_there_is_reported_at_once(closed_port: int) -> None:
    events: list[str] = []
    with pytest.raises(MusterError) as caught:
        asyncio.run(join(code_for(closed_port, LOOPBACK), events=events, patience_s=0.5))
    problem = f"127.0.0.1:{closed_port}: connection refused"
    assert problem in events[0]
    assert caught.value.why.startswith(problem)
    assert "the run has ended" in caught.value.why


@pytest.mark.parametrize("problem", Problem)
def test_each_problem_has_its_fix(problem: Problem, snapshot: SnapshotAssertion) -> None:
    problems = {"10.0.0.1:29400": problem, "[fd00::1]:29400": problem}
    assert str(client._not_reached(problems, 29400, 120, "")) == snapshot


def test_the_host_may_come_later_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = client._connected
    tries = 0

    async def nobody_at_first(address: str, port: int) -> socket.socket:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionRefusedError
        return await real(address, port)

    monkeypatch.setattr(client, "_connected", nobody_at_first)

    async def scene(host: Host) -> None:
        events: list[str] = []
        machine = await join(host.code, events=events)
        assert "connection refused" in events[0]
        await machine.close()

    with_host(scene)


def test_something_that_does_not_speak_tls_is_named() -> None:
    async def scene() -> None:
        async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(web_server, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(MusterError) as caught:
            await join(code_for(port, LOOPBACK), patience_s=0.1)
        server.close()
        assert caught.value.why.startswith(f"127.0.0.1:{port}: {Problem.NOT_TLS.value}")

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("no-place", "muster run --join --nodes N"),
        ("wrong-code", "muster run --join"),
        ("other-protocol", "pip install torchmuster==9.1� "),
    ],
)
def test_each_refusal_has_its_fix(reason: Reason, fix: str, snapshot: SnapshotAssertion) -> None:
    answer = Refused(reason=reason, why="why", protocol=2, torchmuster="9.1\x1b")
    error = client._not_let_in(answer)
    assert fix in error.fix
    assert str(error).replace(__version__, "VERSION") == snapshot
