"""Who comes in where ranks come in: those with the key, once each, and nobody else."""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.notebook.connection import Connection, RankListener
from torchmuster.notebook.messages import (
    NotTheOther,
    Run,
    Wrote,
    introduce_rank,
    new_secret,
)
from torchmuster.notebook.rank_loop import connect

KEY = new_secret()


class Door:
    def __init__(self) -> None:
        self.came: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self.entrance = RankListener(
            KEY, lambda rank, connection: self.came.put((rank, connection))
        )


@contextlib.contextmanager
def door() -> Iterator[Door]:
    one = Door()
    try:
        yield one
    finally:
        one.entrance.close()


def knock(one: Door) -> socket.socket:
    return socket.create_connection(("127.0.0.1", one.entrance.port), GIVE_UP_S)


def send(connection: Connection, message: object, times: int) -> None:
    for _ in range(times):
        connection.send(message)


def test_a_rank_with_the_key_comes_in_and_both_speak() -> None:
    with door() as one:
        rank = connect(one.entrance.port, KEY, 3)
        number, notebook = one.came.get(timeout=GIVE_UP_S)
        assert number == 3
        asked = Run(request=1, name="cell-1", code="x" * 3_000_000)
        decoder = msgspec.msgpack.Decoder(Run)
        notebook.send(asked)
        assert rank.receive(decoder) == asked
        threads = [
            threading.Thread(target=send, args=(rank, Wrote(text="y" * 999), 500)),
            threading.Thread(target=send, args=(notebook, asked, 5)),
        ]
        for thread in threads:
            thread.start()
        texts = msgspec.msgpack.Decoder(Wrote)
        assert all(notebook.receive(texts) == Wrote(text="y" * 999) for _ in range(500))
        assert all(rank.receive(decoder) == asked for _ in range(5))
        for thread in threads:
            thread.join()
        rank.close()
        assert notebook.receive(texts) is None
        notebook.close()
        assert one.entrance.refused == []


def test_a_wrong_key_is_refused(snapshot: SnapshotAssertion) -> None:
    with door() as one, knock(one) as end:
        with pytest.raises(NotTheOther, match="closed the connection"):
            introduce_rank(end, new_secret(), 0)
        assert one.came.empty()
    assert one.entrance.refused == snapshot


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(68), os.urandom(9999)],
    ids=["nothing", "a browser", "as long as a proof", "much"],
)
def test_who_has_no_key_is_refused_and_told_nothing(said: bytes) -> None:
    with door() as one, knock(one) as end:
        challenge = end.recv(32)
        assert len(challenge) == 32
        with contextlib.suppress(OSError):  # it may be closed by now, with bytes unread
            end.sendall(said)
            end.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1) == b""
    assert len(one.entrance.refused) == 1
    assert one.came.empty()


def test_what_a_rank_proved_once_is_of_no_use_to_who_overheard_it() -> None:
    overheard: list[bytes] = []

    class Overheard(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]
            overheard.append(bytes(data))
            super().sendall(data, *flags)

    with door() as one:
        with Overheard() as listened_to:
            listened_to.connect(("127.0.0.1", one.entrance.port))
            introduce_rank(listened_to, KEY, 0)
            one.came.get(timeout=GIVE_UP_S)[1].close()
        with knock(one) as end:
            end.recv(32)
            end.sendall(overheard[0])
            assert end.recv(1) == b""
    assert one.came.empty()


def test_a_rank_comes_once() -> None:
    with door() as one:
        first = connect(one.entrance.port, KEY, 0)
        _, here = one.came.get(timeout=GIVE_UP_S)
        with knock(one) as end:
            introduce_rank(end, KEY, 0)
            assert end.recv(1) == b""
        first.close()
        here.close()
    assert one.entrance.refused == ["rank 0 is already connected"]


def test_a_rank_speaks_to_nobody_without_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def pose() -> None:
            end, _ = stranger.accept()
            with end:
                end.sendall(os.urandom(32))
                end.recv(68)
                end.sendall(os.urandom(32))

        thread = threading.Thread(target=pose)
        thread.start()
        with (
            socket.create_connection(stranger.getsockname(), GIVE_UP_S) as end,
            pytest.raises(NotTheOther, match="not the notebook"),
        ):
            introduce_rank(end, KEY, 0)
        thread.join()


def test_nothing_listens_after_it_was_closed() -> None:
    with door() as one:
        port = one.entrance.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_message_that_is_nested_too_deeply_ends_the_connection() -> None:
    here, there = socket.socketpair()
    with here, there:
        nested = b"\x82\xa1y" + b"\x91" * 100_000
        here.sendall(len(nested).to_bytes(4, "big") + nested)
        connection = Connection(there)
        assert connection.receive(msgspec.msgpack.Decoder(Run)) is None
        connection.close()
