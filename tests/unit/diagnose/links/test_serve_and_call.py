"""What a machine opens for the others and how it calls them: real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.diagnose.links import call, serve, transfer
from torchmuster.errors import MusterError
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


def test_both_directions_of_a_good_link_are_measured() -> None:
    (result,) = while_served(measured)["results"]
    assert result["problem"] == ""
    for figures in (result["there"], result["back"]):
        assert figures["bytes_per_s"] > 1e3  # of which a busy machine may be very slow
        assert figures["round_trip_s"] > 0
        assert (figures["stalled"], figures["wrong_bytes"]) == (False, 0)


def test_who_is_reached_is_told_for_each_target() -> None:
    async def work(served: Served) -> Any:
        good = target_of(served)
        with socket.socket() as other:  # which does not listen, and keeps others from the port
            other.bind((HERE, 0))
            closed = {**good, "port": other.getsockname()[1]}
            asked = {"nonce": NONCE, "targets": [good, closed], "timeout_s": GIVE_UP_S}
            return await call.call(asked)

    first, second = while_served(work)["results"]
    assert first["problem"] == ""
    assert first["there"] is None
    assert second["problem"] == "impostor"  # our own address, and nothing of ours is there


def test_every_byte_that_changes_on_the_way_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    true_block = transfer.block_of(NONCE)
    wrong_block = bytes([true_block[0] ^ 1]) + true_block[1:]
    monkeypatch.setattr(transfer, "MOST_BYTES", 128 * 1024)

    async def work(served: Served) -> Any:
        monkeypatch.setattr(transfer, "block_of", lambda nonce: wrong_block)
        return await measured(served)

    (result,) = while_served(work)["results"]
    assert result["there"]["wrong_bytes"] == result["back"]["wrong_bytes"] == 1


def test_data_that_stalls_is_told_from_a_link_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*arguments: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(call, "STALLED_S", 0.05)
    monkeypatch.setattr(transfer, "receive_blocks", never)
    (result,) = while_served(measured)["results"]
    assert result["problem"] == ""
    for figures in (result["there"], result["back"]):
        assert figures["stalled"]
        assert figures["bytes_per_s"] is None
        assert figures["round_trip_s"] > 0  # the small messages did pass


def test_a_connection_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up(*arguments: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(serve.Service, "_do", hang_up)
    (result,) = while_served(measured)["results"]
    assert result["problem"] == "dropped"
    assert result["there"] is None


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
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
        writer.close()
        return answer

    assert while_served(work) == b""


@pytest.mark.parametrize(
    "header",
    [
        transfer.HEADER.pack(transfer.GIVE, transfer.MOST_BYTES + 1),
        transfer.HEADER.pack(transfer.GIVE, 2**63),
        transfer.HEADER.pack(b"x", 1),
    ],
    ids=["too much", "far too much", "unknown"],
)
def test_what_is_not_allowed_ends_the_connection(header: bytes) -> None:
    async def work(served: Served) -> bytes:
        reader, writer = await asyncio.open_connection(HERE, served["port"])
        writer.write(listening.request_line(NONCE))
        assert await reader.readline() == NONCE.encode() + b"\n"
        writer.write(header)
        answer = await asyncio.wait_for(reader.read(), GIVE_UP_S)
        writer.close()
        return answer

    assert while_served(work) == b""


def test_a_taken_meeting_port_names_its_holder() -> None:
    async def work(served: Served) -> Served:
        return served

    with socket.create_server((HERE, 0)) as other:
        taken = other.getsockname()[1]
        served = while_served(work, meeting=True, port=taken)
    assert served["meeting_port"] is None
    assert f"port {taken}" in served["meeting_trouble"]["what"]
    assert "python" in served["meeting_trouble"]["why"]


def test_it_closes_by_itself() -> None:
    async def run() -> None:
        served = await serve.open_service({"nonce": NONCE, "address": HERE, "for_s": 0.05})
        while NONCE in serve._open:
            await asyncio.sleep(0.01)
        await asyncio.gather(*serve._closing)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HERE, served["port"])

    asyncio.run(asyncio.wait_for(run(), GIVE_UP_S))


def test_what_is_no_question_is_an_error() -> None:
    with pytest.raises(MusterError, match="not Call"):
        asyncio.run(call.call({"nonce": NONCE, "targets": "all"}))
    with pytest.raises(MusterError, match="not Serve"):
        asyncio.run(serve.open_service({}))


def test_a_machine_tells_its_interfaces_and_ports() -> None:
    (loopback,) = [one for one in serve.interfaces_here() if one.name == "lo"]
    assert "127.0.0.1/8" in loopback.networks
    assert loopback.up
    first, last = serve.given_out_ports()
    assert 1024 <= first < last < 65536
