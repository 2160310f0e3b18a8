"""The port at which ranks will meet: which one, for whom, and what is said to those who try it."""

import asyncio
import contextlib
import os
import random
import socket

import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces, listening
from torchmuster.launch.network.interfaces import Interface

NONCE = "c0ffee" * 5
MACHINE = [
    Interface(name="lo", up=True, addresses=("127.0.0.1",)),
    Interface(name="eth0", up=True, addresses=("10.0.0.5",)),
    Interface(name="eth3", up=True, addresses=("127.0.0.3",)),
]
# Addresses of loopback, which stand for those of several interfaces.
PLACES = [protocol.Address(address=f"127.0.0.{last}", interface=f"eth{last}") for last in (2, 3, 4)]


@pytest.fixture(autouse=True)
def three_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interface_candidates", lambda known=None: list(PLACES))


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is hung up on because the machine is busy, but where a test asks for it."""
    monkeypatch.setattr(listening, "PATIENCE_S", GIVE_UP_S)


@pytest.fixture
def usual_ports(monkeypatch: pytest.MonkeyPatch) -> int:
    """Put the usual ports where at least three in a row are free, and say where."""
    with contextlib.ExitStack() as held:
        for start in random.sample(range(20_000, 29_000, 3), 100):
            try:
                for port in range(start, start + 3):
                    held.enter_context(socket.create_server(("0.0.0.0", port)))
            except OSError:
                held.close()
                continue
            break
    monkeypatch.setattr(listening, "USUAL_PORT", start)
    monkeypatch.setattr(listening, "LAST_USUAL_PORT", start + 2)
    return start


async def opened(port: int | None = 0, address: str | None = None) -> listening.OpenPort:
    return listening.open_port(port, address, interfaces=MACHINE).value


def can_bind(address: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError:
            return False
        return True


async def say(address: str, port: int, words: bytes, *, hang_up: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        writer.write(words)
        if hang_up:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_all_addresses_listen_on_one_port_that_nobody_else_can_have() -> None:
    async def run() -> None:
        port = await opened()
        number = port.port
        assert port.addresses == tuple(PLACES)
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4", "0.0.0.0"):
            assert not can_bind(address, number)
        await port.close()
        assert can_bind("0.0.0.0", number)

    asyncio.run(run())


def test_whoever_knows_the_nonce_is_told_it_at_every_address() -> None:
    async def run() -> list[bytes]:
        port = await opened()
        await port.answer(NONCE)
        try:
            words = listening.request_line(NONCE)
            return [await say(one.address, port.port, words) for one in port.addresses]
        finally:
            await port.close()

    assert asyncio.run(run()) == [NONCE.encode() + b"\n"] * 3


@pytest.mark.parametrize(
    "words",
    [
        b"muster-reach who\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        listening.request_line("another nonce"),
        listening.request_line(NONCE).rstrip(),
        b"x" * 100_000,
        b"\0\xff" * 300,
        b"",
    ],
)
def test_anybody_else_is_told_nothing_and_the_next_caller_is_served(words: bytes) -> None:
    async def run() -> tuple[bytes, bytes]:
        port = await opened()
        await port.answer(NONCE)
        try:
            stranger = await say("127.0.0.2", port.port, words, hang_up=True)
            friend = await say("127.0.0.2", port.port, listening.request_line(NONCE))
            return stranger, friend
        finally:
            await port.close()

    assert asyncio.run(run()) == (b"", NONCE.encode() + b"\n")


def test_a_silent_caller_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "PATIENCE_S", 0.05)

    async def run() -> bytes:
        port = await opened()
        await port.answer(NONCE)
        try:
            return await asyncio.wait_for(say("127.0.0.2", port.port, b"muster-"), GIVE_UP_S)
        finally:
            await port.close()

    assert asyncio.run(run()) == b""


def test_the_kept_socket_still_listens_and_the_others_do_not() -> None:
    async def run() -> None:
        port = await opened()
        await port.answer(NONCE)
        number = port.port
        kept = await port.keep("127.0.0.3")
        with kept:
            assert kept.getsockname() == ("127.0.0.3", number)
            assert kept.getblocking()
            assert not os.get_inheritable(kept.fileno())
            assert not can_bind("127.0.0.3", number)
            assert can_bind("127.0.0.2", number)
            with socket.create_connection(("127.0.0.3", number), timeout=GIVE_UP_S) as caller:
                mine, _ = kept.accept()
                mine.close()
                assert caller.recv(1) == b""  # nobody answers with the nonce any more

    asyncio.run(run())


def close(port: listening.OpenPort) -> None:
    asyncio.run(port.close())


@pytest.mark.parametrize("is_given", [False, True])
def test_the_usual_port_or_a_given_one_is_taken_if_it_is_free(
    usual_ports: int, is_given: bool
) -> None:
    decision = listening.open_port(usual_ports if is_given else None, interfaces=MACHINE)
    number = decision.value.port
    close(decision.value)
    assert number == usual_ports
    assert decision.reason == f"port {usual_ports}"


def test_the_next_free_port_is_taken_and_the_holder_of_the_usual_one_is_named(
    usual_ports: int,
) -> None:
    # One address is enough to pass a port over.
    with socket.create_server(("127.0.0.3", usual_ports)):
        decision = listening.open_port(None, interfaces=MACHINE)
        number = decision.value.port
        close(decision.value)
    assert number == usual_ports + 1
    assert decision.reason.startswith(f"port {number}: ")
    assert f" {usual_ports} " in decision.reason
    assert f"(pid {os.getpid()}, user " in decision.reason


@pytest.mark.parametrize("alone", [False, True])
def test_a_given_port_that_is_taken_is_refused_with_its_holder(alone: bool) -> None:
    with socket.create_server(("0.0.0.0", 0)) as sock:
        port = sock.getsockname()[1]
        ask = listening.open_loopback if alone else listening.open_port
        with pytest.raises(Impossible) as refusal:
            ask(port)
    assert refusal.value.what == f"port {port} is in use"
    assert f"(pid {os.getpid()}, " in refusal.value.why
    assert "omit distributed.master_port" in refusal.value.fix


@pytest.mark.parametrize("address", ["lo", "10.0.0.77", "head", "nobody"])
def test_an_address_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    known = {"head": ["10.0.0.77"]}
    monkeypatch.setattr(interfaces, "resolve_host", lambda name: known.get(name, []))
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    with pytest.raises(Impossible) as refusal:
        listening.open_port(0, address, interfaces=MACHINE)
    assert "127.0.0.2 (eth2), 127.0.0.3 (eth3), 127.0.0.4 (eth4)" in refusal.value.why
    assert refusal.value.what == f"cannot listen on {address}"
    assert "node7" in refusal.value.why
    assert "--set launch.address=" in refusal.value.fix


@pytest.mark.parametrize("port", [None, 0])
def test_alone_the_port_is_open_on_loopback_only(port: int | None) -> None:
    with listening.open_loopback(port) as sock:
        address, number = sock.getsockname()
        assert address == "127.0.0.1"
        assert not can_bind("127.0.0.1", number)
        assert can_bind("127.0.0.2", number)
