"""The parts of the collectives probe in one process: exact values, limits, quotas, slow pairs."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from patience import GIVE_UP_S
from torchmuster import distributed
from torchmuster.diagnose.probes import exact_values, matmul
from torchmuster.diagnose.probes.exact_values import (
    OPERATIONS,
    Seat,
    compare_values,
    exact_numbers,
    exact_sums,
)
from torchmuster.diagnose.probes.in_time import Absent, Hangs, ProbeHeartbeat, RankBarrier, in_time
from torchmuster.diagnose.rank_record import Values

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


# ---- values


@pytest.mark.parametrize("size", [1, 2, 3, 64, 4000])
def test_what_the_ranks_contribute_adds_up_exactly(size: int) -> None:
    added = sum((exact_numbers(rank, 2000, 5, CPU) for rank in range(size)), torch.zeros(2000))
    assert compare_values(added, exact_sums(size, 2000, 5, CPU)) == Values(compared=2000)
    assert float(exact_sums(size, 2000, 5, CPU).max()) < 2**24  # beyond, floats leave numbers out


def test_a_single_wrong_value_is_counted_with_its_place() -> None:
    got = exact_numbers(0, 1_000_000, 0, CPU)
    got[765432] = float("nan")
    values = compare_values(got, exact_numbers(0, 1_000_000, 0, CPU))
    assert (values.compared, values.wrong, values.place) == (1_000_000, 1, 765432)
    assert values.expected == float(exact_numbers(0, 1_000_000, 0, CPU)[765432])


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seat]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    distributed.setup_distributed(0, 1, "gloo")
    yield Seat(rank=0, world_size=1, device=CPU)
    distributed.cleanup_distributed()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_collective_fills_what_is_compared(group_of_one: Seat, name: str) -> None:
    for _, got, expected in OPERATIONS[name](group_of_one, 100, 0):
        assert compare_values(got, expected) == Values(compared=100)


def test_a_collective_that_does_nothing_is_wrong(
    group_of_one: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_gather", lambda *_, **__: None)
    ((source, got, expected),) = exact_values.all_gather(group_of_one, 100, 0)
    assert source == 0
    assert compare_values(got, expected).wrong == 100


def test_products_are_exact_in_every_precision() -> None:
    for precision in (torch.float32, torch.bfloat16, torch.float16):
        left, right, expected = matmul._factors(CPU, precision)
        assert compare_values(torch.matmul(left, right), expected).wrong == 0


@pytest.mark.parametrize("bf16", [False, True])
def test_products_are_measured_in_the_dtypes_that_the_gpu_has(
    bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    dtypes = matmul.gpu_dtypes()
    assert (torch.bfloat16 in dtypes) is bf16
    assert {torch.float32, torch.float16} <= set(dtypes)


# ---- limits


def test_work_that_goes_on_is_not_taken_for_work_that_hangs() -> None:
    heartbeat, release = ProbeHeartbeat(), threading.Event()

    def steady() -> str:
        for _ in range(22):
            release.wait(0.5)
            heartbeat.beat()
        return "done"

    # Each beat may come far later than it should; all of them together take longer than this.
    assert in_time(steady, 10.0, heartbeat) == "done"
    stuck = threading.Event()
    with pytest.raises(Hangs, match=r"no answer within 0.5 s"):
        in_time(stuck.wait, 0.5, ProbeHeartbeat())
    stuck.set()
    for thread in threading.enumerate():
        if thread.name == "in-time":
            thread.join(GIVE_UP_S)


def test_a_first_call_may_take_long_on_gpus() -> None:
    assert exact_values.silent_s(torch.device("cuda", 1)) > 40 > exact_values.silent_s(CPU)


def test_ranks_read_what_all_have_written_and_learn_who_is_missing() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        boards = [RankBarrier(store, rank, 4) for rank in range(3)]
        at_once = threading.Barrier(3, timeout=GIVE_UP_S)

        def share(board: RankBarrier) -> Absent:
            at_once.wait()
            with pytest.raises(Absent) as caught:
                board.share("here", board._rank, 3)
            return caught.value

        assert [error.ranks for error in pool.map(share, boards)] == [(3,)] * 3
    late = RankBarrier(store, 3, 4)
    assert late.share("here", 3, 5) == [0, 1, 2, 3]
