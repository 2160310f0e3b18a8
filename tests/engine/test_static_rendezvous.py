"""The rendezvous of torchrun's agents: torch's static one, on a socket that is already open."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from torchmuster.launch.node import static_rendezvous

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def registered() -> None:
    if static_rendezvous.RENDEZVOUS not in rendezvous_handler_registry._registry:
        static_rendezvous.register_rendezvous()


@pytest.fixture
def opened() -> Iterator[socket.socket]:
    """A listening socket on one address of the loopback interface, as a node agent opens it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        yield listener


def handler(rank: int, listener: socket.socket, **more: Any) -> RendezvousHandler:
    address, port = listener.getsockname()
    return rendezvous_handler_registry.create_handler(
        RendezvousParameters(
            backend=static_rendezvous.RENDEZVOUS,
            endpoint=f"{address}:{port}",
            run_id="run.0",
            min_nodes=2,
            max_nodes=2,
            rank=str(rank),  # as in torchrun's --rdzv-conf
            timeout="60",
            **more,
        )
    )


def both(listener: socket.socket) -> list[RendezvousInfo]:
    """Meet as two hosts; the store of the first takes over the socket, as the agent takes its copy."""
    first = handler(0, listener, socket=str(listener.dup().detach()))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda one: one.next_rendezvous(), [first, handler(1, listener)]))


def test_it_is_torch_s_own_static_rendezvous(opened: socket.socket) -> None:
    one = handler(1, opened)
    assert isinstance(one, StaticTCPRendezvous)
    assert (one.get_backend(), one.get_run_id(), one.use_agent_store) == (
        "torchmuster",
        "run.0",
        True,
    )
    assert one.num_nodes_waiting() == 0  # type: ignore[no-untyped-call]


def test_two_hosts_meet_in_the_order_they_were_given(opened: socket.socket) -> None:
    infos = both(opened)
    assert [(one.rank, one.world_size) for one in infos] == [(0, 2), (1, 2)]
    assert {
        (one.bootstrap_store_info.master_addr, one.bootstrap_store_info.master_port)
        for one in infos
        if one.bootstrap_store_info
    } == {opened.getsockname()}
    infos[0].store.set("key", "of the first")
    assert infos[1].store.get("key") == b"of the first"


def test_the_store_listens_on_the_given_socket_alone(opened: socket.socket) -> None:
    infos = both(opened)
    address, port = opened.getsockname()
    client = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    client.set("key", "value")
    assert client.get("key") == b"value"
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.1", port))  # TCPStore by itself would answer on every address
    del infos


def test_a_second_rendezvous_of_the_same_agent_has_the_same_store(opened: socket.socket) -> None:
    first = handler(0, opened, socket=str(opened.dup().detach()))
    second = handler(1, opened)
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda one: one.next_rendezvous(), [first, second]))
    infos[0].store.set("key", "value")
    assert first.next_rendezvous().store.get("key") == b"value"


def test_each_attempt_has_an_empty_store(opened: socket.socket) -> None:
    infos = both(opened)
    infos[0].store.set("key", "of the first attempt")
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        again = both(listener)
        assert not again[0].store.check(["key"])
        assert not again[1].store.check(["key"])
