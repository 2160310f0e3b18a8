"""Small values of all ranks, combined on rank 0: through every kind of store, with errors and deaths."""

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.checkpointing import exchange
from torchmuster.train.checkpointing.exchange import RankExchange, RankFailure, first_of, nothing
from torchmuster.train.stop_request import process_address

pytestmark = pytest.mark.engine


def add(numbers: list[int]) -> int:
    return sum(numbers)


class Ranks:
    """Threads that are ranks, each with its own connection to a store."""

    def __init__(self, count: int, connect: Callable[[], Store]) -> None:
        stores = [connect() for _ in range(count)]
        self.store = connect()
        self.exchanges = [RankExchange(rank, count, one) for rank, one in enumerate(stores)]

    def run(self, function: Callable[[int, RankExchange], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.exchanges)) as pool:
            running = [pool.submit(function, *one) for one in enumerate(self.exchanges)]
            return [one.result(GIVE_UP_S) for one in running]


@pytest.fixture
def tcp_store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a store; groups are small, because every 25th connection of a process looks up a name."""
    monkeypatch.setattr(exchange, "_GROUP", 4)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("kind", ["TCPStore", "HashStore", "FileStore"])
@pytest.mark.parametrize("count", [2, 11])
def test_all_ranks_hear_what_rank_0_combines(
    kind: str, count: int, tcp_store: Any, tmp_path: Path
) -> None:
    memory = HashStore()
    ranks = Ranks(
        count,
        {
            "TCPStore": lambda: PrefixStore("x", tcp_store.clone()),
            "HashStore": lambda: memory,
            "FileStore": lambda: FileStore(str(tmp_path / "store")),
        }[kind],
    )
    size = len(ranks.exchanges)

    def turns(rank: int, one: RankExchange) -> list[Any]:
        return [
            one.run(lambda: {"rank": rank}, lambda values: [value["rank"] for value in values]),
            one.run(lambda: rank, add),
            one.run(lambda: f"of {rank}", first_of),
            one.run(lambda: None, nothing),
        ]

    expected = [list(range(size)), sum(range(size)), "of 0", None]
    assert ranks.run(turns) == [expected] * size
    ranks.run(lambda rank, one: one.close())
    if kind != "FileStore":  # which keeps the keys that were deleted
        assert ranks.store.num_keys() <= 1  # torch's own key


def test_an_error_on_any_rank_is_raised_on_all(tcp_store: Any) -> None:
    ranks = Ranks(10, tcp_store.clone)

    def fail(rank: int, one: RankExchange) -> list[str]:
        said = []
        for failing, combine in (({3, 6}, nothing), ({9}, nothing), (set(), lambda _: 1 // 0)):

            def work(failing: set[int] = failing) -> None:
                if rank in failing:
                    raise MusterError("no room", why="full", fix="delete")

            with pytest.raises(RankFailure) as raised:
                one.run(work, combine)
            said.append(str(raised.value))
        assert one.run(lambda: rank, add) == sum(range(10))  # and it goes on
        return said

    said = ranks.run(fail)
    assert said == [said[0]] * 10
    assert said[0] == [
        "rank 3: no room; full; delete (and 1 more ranks failed)",
        "rank 9: no room; full; delete",
        "rank 0: ZeroDivisionError: integer division or modulo by zero",
    ]


def test_a_rank_that_died_is_named(tcp_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two leaders one is dead, and a rank of the first group."""
    monkeypatch.setattr(exchange, "_LIVENESS_EVERY_S", 0.01)
    dead = {2, 4}
    ranks = Ranks(7, tcp_store.clone)
    process = subprocess.Popen(["true"])
    process.wait()
    for rank in dead:
        here = process_address().rpartition(" ")[0]
        tcp_store.set(f"process/{rank}", f"{here} {process.pid}")

    def run(rank: int, one: RankExchange) -> str:
        if rank in dead:
            return ""
        with pytest.raises(RankFailure) as raised:
            one.run(lambda: rank, add)
        return str(raised.value)

    for rank, said in enumerate(ranks.run(run)):
        expected = "rank 2: its process has exited, or did not answer (and 3 more ranks failed)"
        assert said == ("" if rank in dead else expected)


def test_a_store_that_is_gone_is_an_error(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = RankExchange(1, 2, TCPStore("127.0.0.1", server.port, is_master=False))
    said: list[BaseException] = []

    def wait() -> None:
        try:
            waiting.run(lambda: 1, first_of)
        except MusterError as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not server.check(["0/1"]):  # its message
        pass
    del server
    thread.join(GIVE_UP_S)
    assert [type(one) for one in said] == [MusterError]


def test_one_rank_needs_no_store() -> None:
    alone = RankExchange(0, 1, None)
    assert alone.run(lambda: (1, 2), first_of) == [1, 2]
    with pytest.raises(RankFailure, match=r"^rank 0: OSError: full$"):
        alone.run(lambda: (_ for _ in ()).throw(OSError("full")), nothing)
    alone.close()


def test_a_closed_exchange_refuses_instead_of_committing_alone() -> None:
    exchange = RankExchange(1, 2, HashStore())
    exchange._closed = True
    with pytest.raises(Impossible):
        exchange.run(lambda: "mine", lambda values: values)
