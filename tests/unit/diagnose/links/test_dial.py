"""What a machine opens for the others and how it dials them: real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.diagnose.links import dial
from torchmuster.launch.network import listening

NONCE = "5eed" * 8
HERE = "127.0.0.1"

Opened = dict[str, Any]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up because the machine is busy, but where a test requires it."""
    monkeypatch.setattr(listening, "PATIENCE_S", GIVE_UP_S)
    for name in ("_PATIENCE_S", "LIMIT_S", "STALLED_S"):
        monkeypatch.setattr(dial, name, GIVE_UP_S)


def while_open(work: Callable[[Opened], Awaitable[Any]], **request: Any) -> Any:
    async def run() -> Any:
        opened = await dial.open_ports({"nonce": NONCE, "address": HERE, **request})
        try:
            return await work(opened)
        finally:
            await dial.close_ports(NONCE)

    return asyncio.run(run())


def dialed(*ports: int, measure: bool = False) -> Awaitable[Any]:
    targets = [{"address": HERE, "port": port} for port in ports]
    request = {"nonce": NONCE, "targets": targets, "timeout_s": GIVE_UP_S, "measure": measure}
    return dial.dial(request)


def measured(opened: Opened) -> Awaitable[Any]:
    return dialed(opened["port"], measure=True)


def test_a_good_link_is_measured() -> None:
    (result,) = while_open(measured)
    assert (result["problem"], result["source_address"]) == ("", HERE)
    assert result["speed"]["bytes_per_s"] > 1e3  # of which a busy machine may be very slow
    assert result["speed"]["wrong_bytes"] == 0


def test_the_result_for_each_target_is_its_own() -> None:
    async def work(opened: Opened) -> Any:
        with socket.socket() as other:  # which does not listen, and keeps others from the port
            other.bind((HERE, 0))
            return await dialed(opened["port"], other.getsockname()[1])

    first, second = while_open(work)
    assert (first["problem"], first["speed"]) == ("", None)
    assert second["problem"] == "impostor"  # our own address, and nothing of ours is there


def test_every_byte_that_changes_on_the_way_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    send = dial._send

    async def change(writer: asyncio.StreamWriter, data: bytes) -> None:
        await send(writer, bytes([data[0] ^ 1]) + data[1:])

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)

    monkeypatch.setattr(dial, "_send", change)
    monkeypatch.setattr(dial, "_echo_all", echo)
    monkeypatch.setattr(dial, "_MEASURED_S", 1e-9)
    (result,) = while_open(measured)
    assert result["speed"]["wrong_bytes"] == 2  # of the first block, and of the others


def test_data_that_stalls_gives_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(writer: asyncio.StreamWriter, data: bytes) -> None:
        pass

    monkeypatch.setattr(dial, "STALLED_S", 0.05)
    monkeypatch.setattr(dial, "_send", nothing)
    (result,) = while_open(measured)
    assert (result["problem"], result["speed"]["bytes_per_s"]) == ("", None)


@pytest.mark.parametrize(
    "request_line", [b"GET / HTTP/1.1\r\n\r\n", listening.request_line("another nonce")]
)
def test_a_stranger_gets_nothing(request_line: bytes) -> None:
    async def work(opened: Opened) -> bytes:
        reader, writer = await asyncio.open_connection(HERE, opened["port"])
        writer.write(request_line)
        writer.write_eof()
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
        writer.close()
        return answer

    assert while_open(work) == b""


def test_a_rendezvous_port_in_use_is_not_tested() -> None:
    async def work(opened: Opened) -> Opened:
        return opened

    with socket.create_server((HERE, 0)) as other:
        taken = other.getsockname()[1]
        assert while_open(work, rendezvous=True, port=taken)["rendezvous_port"] is None
