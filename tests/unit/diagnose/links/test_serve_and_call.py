"""What a machine opens for the others and how it calls them: real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.diagnose.links import call, serve
from torchmuster.launch.network import listening

NONCE = "5eed" * 8
HERE = "127.0.0.1"

Served = dict[str, Any]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up because the machine is busy, but where a test asks for it."""
    for place, name in (
        (listening, "PATIENCE_S"),
        (serve, "_PATIENCE_S"),
        (call, "LIMIT_S"),
        (call, "_PING_S"),
        (call, "STALLED_S"),
    ):
        monkeypatch.setattr(place, name, GIVE_UP_S)


def while_served(work: Callable[[Served], Awaitable[Any]], **asked: Any) -> Any:
    async def run() -> Any:
        served = await serve.open_service({"nonce": NONCE, "address": HERE, **asked})
        try:
            return await work(served)
        finally:
            await serve.close_service({"nonce": NONCE})

    return asyncio.run(run())


def target_of(served: Served) -> dict[str, Any]:
    return {
        "address": HERE,
        "port": served["port"],
    }


def measured(served: Served, **asked: Any) -> Awaitable[Any]:
    usual = {"nonce": NONCE, "measure": True, "timeout_s": GIVE_UP_S}
    return call.call({**usual, "targets": [target_of(served)], **asked})


def test_a_good_link_is_measured() -> None:
    (result,) = while_served(measured)
    assert result["problem"] == ""
    figures = result["figures"]
    assert figures["bytes_per_s"] > 1e3  # of which a busy machine may be very slow
    assert figures["round_trip_s"] > 0
    assert figures["wrong_bytes"] == 0


def test_who_is_reached_is_told_for_each_target() -> None:
    async def work(served: Served) -> Any:
        good = target_of(served)
        with socket.socket() as other:  # which does not listen, and keeps others from the port
            other.bind((HERE, 0))
            closed = {**good, "port": other.getsockname()[1]}
            asked = {"nonce": NONCE, "targets": [good, closed], "timeout_s": GIVE_UP_S}
            return await call.call(asked)

    first, second = while_served(work)
    assert first["problem"] == ""
    assert first["figures"] is None
    assert second["problem"] == "impostor"  # our own address, and nothing of ours is there


Send = Callable[[socket.socket, bytes, int], Awaitable[None]]
send: Send = call._send


def test_every_byte_that_changes_on_the_way_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def change(connection: socket.socket, block: bytes, count: int) -> None:
        await send(connection, bytes([block[0] ^ 1]) + block[1:], count)

    monkeypatch.setattr(call, "_send", change)
    monkeypatch.setattr(call, "_PINGS", 2)
    monkeypatch.setattr(call, "_COUNT", 4)
    monkeypatch.setattr(call, "_LONG_S", GIVE_UP_S)
    monkeypatch.setattr(call, "_MEASURED_S", 1e-9)
    (result,) = while_served(measured)
    assert result["figures"]["wrong_bytes"] == 2 + 1 + 4


def test_data_that_stalls_is_told_from_a_link_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def small_only(connection: socket.socket, block: bytes, count: int) -> None:
        if len(block) < 1500:
            await send(connection, block, count)

    monkeypatch.setattr(call, "STALLED_S", 0.05)
    monkeypatch.setattr(call, "_send", small_only)
    (result,) = while_served(measured)
    assert result["problem"] == ""
    assert result["figures"]["bytes_per_s"] is None
    assert result["figures"]["round_trip_s"] > 0  # the small messages did pass


def test_a_connection_that_is_lost_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up(connection: socket.socket) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(serve, "_echo", hang_up)
    (result,) = while_served(measured)
    assert result["problem"] == ""
    assert result["figures"]["bytes_per_s"] is None


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        listening.request_line("another nonce"),
        b"\0" * 200,
    ],
)
def test_a_stranger_gets_nothing(said: bytes) -> None:
    async def work(served: Served) -> bytes:
        reader, writer = await asyncio.open_connection(HERE, served["port"])
        writer.write(said)
        writer.write_eof()
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
        writer.close()
        return answer

    assert while_served(work) == b""


def test_a_taken_rendezvous_port_names_its_holder() -> None:
    async def work(served: Served) -> Served:
        return served

    with socket.create_server((HERE, 0)) as other:
        taken = other.getsockname()[1]
        served = while_served(work, rendezvous=True, port=taken)
    assert served["rendezvous_port"] is None
    assert f"port {taken}" in served["rendezvous_trouble"]["what"]
    assert "python" in served["rendezvous_trouble"]["why"]
