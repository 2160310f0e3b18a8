"""What a joining machine says when the host is not there, not reachable, or somebody else."""

import asyncio
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster import __version__
from torchmuster.errors import MusterError
from torchmuster.launch.transports.join import certificate, client, messages
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.join.messages import Reason, Refused
from unit.launch.join.open_host import LOOPBACK, join, open_host

pytestmark = pytest.mark.usefixtures("time_enough")


def code_for(port: int, *addresses: str) -> JoinCode:
    return JoinCode(
        port=port, addresses=addresses, secret=os.urandom(16), fingerprint=os.urandom(16)
    )


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that patience is measured by: it stands still until the test moves it.

    So nobody runs out of patience, nor says that it takes long, because the machine is busy.
    """
    now_s = [0.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(client, "TELL_EVERY_S", GIVE_UP_S)
    return now_s


class LastEvents(list[str]):
    """What is told; with the first of it the patience is over."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def append(self, event: str) -> None:
        super().append(event)
        self._clock[0] += GIVE_UP_S


def test_nobody_there_is_said_at_once_and_ends_in_the_reason(
    closed_port: int, clock: list[float], snapshot: SnapshotAssertion
) -> None:
    port, events = closed_port, LastEvents(clock)
    with pytest.raises(MusterError) as caught:
        asyncio.run(join(code_for(port, LOOPBACK), events=events, patience_s=0.5))
    (event,) = events
    assert event.replace(str(port), "PORT") == snapshot
    assert f"127.0.0.1:{port}: " in caught.value.why
    assert str(caught.value).replace(str(port), "PORT") == snapshot


def test_no_answer_names_the_firewall_command(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    async def never(target: client.JoinTarget) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(client, "_connected", never)
    with pytest.raises(MusterError) as caught:
        asyncio.run(join(code_for(29400, "10.0.0.1", "fd00::1"), patience_s=0.1))
    assert caught.value.fix.endswith("\nsudo ufw allow 29400/tcp")
    assert str(caught.value) == snapshot


def test_an_address_that_never_answers_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    # A full backlog: the system neither refuses nor accepts.
    with socket.create_server((LOOPBACK, 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex((LOOPBACK, port))
            with pytest.raises(MusterError) as caught:
                asyncio.run(join(code_for(port, LOOPBACK), patience_s=0.5))
            assert "a firewall blocks the connection" in caught.value.why
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.usefixtures("clock")
def test_the_host_may_come_later_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = client._connected
    tries = 0

    async def nobody_at_first(target: client.JoinTarget) -> socket.socket:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionRefusedError
        return await real(target)

    async def story() -> None:
        async with open_host() as host:
            events: list[str] = []
            machine = await join(host.service.code, events=events)
            assert len(events) == 1
            assert "connection refused" in events[0]
            await machine.close()

    monkeypatch.setattr(client, "_connected", nobody_at_first)
    asyncio.run(story())


@pytest.mark.usefixtures("clock")
def test_it_is_not_silent_while_a_slow_host_takes_its_time(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(client, "TELL_EVERY_S", 0.05)

    async def story() -> None:
        made = certificate.make_certificate()
        told: asyncio.Queue[str] = asyncio.Queue()
        told_twice = asyncio.Event()

        async def slow_host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await told_twice.wait()
            answer = messages.encode_join_message(messages.Welcome(protocol=2, place=1))
            writer.write(len(answer).to_bytes(4, "big") + answer)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(slow_host, LOOPBACK, 0, ssl=made.context)
        port = server.sockets[0].getsockname()[1]
        code = msgspec.structs.replace(code_for(port, LOOPBACK), fingerprint=made.fingerprint)
        joining = asyncio.create_task(
            client.connect_to_host(code, on_event=told.put_nowait, open_firewall=str)
        )
        answers = f" 127.0.0.1:{port}, "
        while answers not in (first := await told.get()):
            assert "120 s" in first
        assert first.replace(str(port), "PORT") == snapshot
        assert await told.get() == first
        told_twice.set()
        machine = await joining
        await machine.close()
        server.close()

    asyncio.run(story())


def test_words_come_often_enough() -> None:
    assert client.TELL_EVERY_S < 10


def test_something_that_does_not_speak_tls_is_named(
    clock: list[float], snapshot: SnapshotAssertion
) -> None:
    async def story() -> None:
        async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            clock[0] += GIVE_UP_S
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(web_server, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(MusterError) as caught:
            await join(code_for(port, LOOPBACK))
        server.close()
        assert f"127.0.0.1:{port}: " in caught.value.why
        assert caught.value.why.replace(str(port), "PORT") == snapshot

    asyncio.run(story())


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("no-place", "muster run --join --nodes N"),
        ("wrong-code", "muster run --join"),
        ("other-protocol", "pip install torchmuster==9.1� "),
    ],
)
def test_each_refusal_says_what_to_do(
    reason: Reason, fix: str, snapshot: SnapshotAssertion
) -> None:
    answer = Refused(reason=reason, why="why", protocol=2, torchmuster="9.1\x1b")
    error = client._not_let_in(answer)
    assert fix in error.fix
    assert str(error).replace(__version__, "VERSION") == snapshot
