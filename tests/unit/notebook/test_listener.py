"""Who may connect as a rank: those of this user, with the key."""

import contextlib
import os
import queue
import socket
import stat
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import msgspec
import pytest

from patience import GIVE_UP_S
from torchmuster.notebook.listener import RankListener
from torchmuster.notebook.messages import Hello, Outbox, Run, Wrote, new_secret, receive, send
from torchmuster.notebook.rank_loop import connect

KEY = new_secret()
CELLS = msgspec.msgpack.Decoder(Run)
TEXTS = msgspec.msgpack.Decoder(Wrote)
Came = queue.SimpleQueue[tuple[Hello, Connection]]


def hello(rank: int) -> Hello:
    return Hello(rank=rank, world_size=4, pid=1, run="a-run")


@contextlib.contextmanager
def listening() -> Iterator[tuple[RankListener, Came]]:
    came: Came = queue.SimpleQueue()
    listener = RankListener(KEY, lambda *rank: came.put(rank))
    try:
        yield listener, came
    finally:
        listener.close()


def test_a_rank_with_the_key_is_admitted_and_both_send() -> None:
    with listening() as (listener, came):
        rank = connect(listener.address, KEY, hello(3))
        came_in, notebook = came.get(timeout=GIVE_UP_S)
        assert came_in == hello(3)
        cell = Run(request=1, name="cell-1", code="x" * 3_000_000)
        sender = threading.Thread(target=send, args=(notebook, cell))
        sender.start()
        assert receive(rank, CELLS) == cell
        sender.join()
        outbox = Outbox(rank)
        for _ in range(500):
            outbox.put(Wrote(text="y" * 999))
        for _ in range(500):
            assert receive(notebook, TEXTS) == Wrote(text="y" * 999)
        outbox.close()
        rank.close()
        assert receive(notebook, TEXTS) is None
        notebook.close()


def test_a_wrong_key_is_refused() -> None:
    with listening() as (listener, came):
        with pytest.raises(AuthenticationError):
            connect(listener.address, new_secret(), hello(0))
        assert came.empty()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(68), os.urandom(9999)],
    ids=["nothing", "a browser", "random bytes", "many bytes"],
)
def test_a_client_without_the_key_is_refused(sent: bytes) -> None:
    with listening() as (listener, came):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.address)
            with contextlib.suppress(OSError):  # it may be closed by now, with bytes unread
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1000):
                    pass
        with connect(listener.address, KEY, hello(0)):
            came.get(timeout=GIVE_UP_S)[1].close()
        assert came.empty()


def test_other_users_cannot_reach_the_socket() -> None:
    with listening() as (listener, _):
        assert stat.S_IMODE(Path(listener.address).parent.stat().st_mode) == 0o700


def test_a_rank_sends_nothing_to_a_listener_without_the_key() -> None:
    with Listener(family="AF_UNIX", authkey=new_secret()) as stranger:

        def accept() -> None:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                stranger.accept()

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(AuthenticationError):
            connect(str(stranger.address), KEY, hello(0))
        thread.join()


def test_nothing_listens_after_it_was_closed() -> None:
    with listening() as (listener, _):
        folder = Path(listener.address).parent
    listener.close()  # once more
    assert not folder.exists()


def test_a_message_that_is_nested_too_deeply_ends_the_connection() -> None:
    here, there = Pipe()
    with here, there:
        here.send_bytes(b"\x82\xa1y" + b"\x91" * 100_000)
        assert receive(there, CELLS) is None
