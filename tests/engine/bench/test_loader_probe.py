"""Reading is measured as it is: waiting and computing data, the same samples in each way, threads in workers."""

import hashlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import Dataset, IterableDataset

from made_up_worlds import made_up_world
from torchmuster.bench import loader
from torchmuster.bench.loader import LoaderAnswer, LoaderRequest, Read, Reading, join_loader_answers
from torchmuster.bench.probes.loader import _computing, content_of, visit_all
from torchmuster.config.settings import Settings
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import Impossible
from torchmuster.train.data.loader_factory import LoaderSpec, loader_for
from torchmuster.train.data.step import Loader

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BATCH = 2
WAIT_S = 0.02
LARGE = bytes(3_000_000)


class Numbers(Dataset[torch.Tensor]):
    """Samples that cost nothing."""

    def __init__(self, size: int = 4000) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Waiting(Numbers):
    """Each sample is waited for, as one from a disk or a network."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(WAIT_S)
        return super().__getitem__(index)


class Drawing(Numbers):
    """Augments with Python's random numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + random.random()])


class Unseeded(Numbers):
    """Draws from what no seed reaches."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.SystemRandom().random()])


class Computing(Numbers):
    """Each sample is computed by several threads of a library that nobody told how many there may be."""

    threads = 2
    pool: ThreadPoolExecutor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads)  # in the worker
        list(self.pool.map(hashlib.sha256, [LARGE] * self.threads))
        return super().__getitem__(index)


class ComputingAlone(Computing):
    """The same by one thread."""

    threads = 1


def reads(
    dataset: Any, workers: tuple[int, ...], *, rounds: int = 1, window_s: float = 0.2
) -> list[Read]:
    world = made_up_world()
    request = LoaderRequest(
        settings=Settings(),
        device="cpu",
        readings=tuple(Reading(workers=one) for one in workers),
        rounds=rounds,
        window_s=window_s,
    )

    def make(reading: Reading) -> Loader:
        batches = LoaderSpec(micro_batch_size=BATCH, workers=reading.workers)
        return loader_for(dataset, world, batches)

    answer = LoaderAnswer(
        rank=0,
        device="cpu",
        samples_per_step=BATCH,
        samples_per_batch=BATCH,
        batch_bytes=8,
        samples=None,
        visits=visit_all(request, make, world),
    )
    return join_loader_answers([answer])


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_data_that_is_waited_for_is_read_faster_by_more_workers_than_there_are_cores() -> None:
    cores = usable_cores().value
    found = reads(Waiting(), (0, 2 * cores))
    alone, many = found
    # A rate cannot be more than the waiting allows, whatever else the machine does.
    assert 0.4 / WAIT_S < alone.rate.median <= 1.01 / WAIT_S
    assert many.rate.median <= 2 * cores * 1.01 / WAIT_S
    assert loader.best_reading(found).value is many
    assert loader.same_data(found).status.value == "ok"
    assert loader.oversubscription(found, cores=cores, ranks=1) is None


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("dataset", [Computing(), ComputingAlone()], ids=["threads", "alone"])
def test_workers_that_compute_with_several_threads_are_found(dataset: Computing) -> None:
    (found,) = reads(dataset, (1,), window_s=0.6)
    assert found.busy_cores is not None
    assert 0 < found.busy_cores <= usable_cores().value + 0.1
    if dataset.threads > 1:
        assert (found.busy_threads or 0) > 1
        assert loader.oversubscription([found], cores=1, ranks=1) is not None
    # A thread that hands batches over may count on a busy machine; that it does little is seen below.


def test_threads_that_do_little_do_not_count() -> None:
    assert _computing([1.0, 0.9, 0.01]) == 2
    assert _computing([1.0, 0.01]) == 1
    assert _computing([0.0]) == 1


def test_what_is_drawn_at_random_is_told_from_what_no_seed_reaches(
    snapshot: SnapshotAssertion,
) -> None:
    drawn = loader.same_data(reads(Drawing(), (0, 1, 2)))
    assert drawn.name == "data-same"
    assert drawn == snapshot(name="drawn at random")
    unseeded = loader.same_data(reads(Unseeded(), (1, 2)))
    assert unseeded == snapshot(name="unseeded")


def test_a_short_dataset_is_read_again_and_again() -> None:
    (found,) = reads(Numbers(3), (0,), rounds=2)
    assert len(found.samples_s) >= 6
    assert len(found.values) == 1


class Stream(IterableDataset[torch.Tensor]):
    """Samples without numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([one]) for one in range(self.size))


def test_a_stream_is_read_too() -> None:
    found = reads(Stream(300), (0, 1))
    assert [one.indices for one in found] == [("",), ("",)]  # it has no numbers
    assert loader.same_data(found).status.value == "ok"


def test_data_without_samples_is_refused() -> None:
    with pytest.raises(Impossible, match="the data has no samples"):
        reads(Stream(0), (0,))


def test_the_content_of_a_batch_is_all_of_it() -> None:
    batch = {"image": torch.zeros(2, 3), "names": ["a", "b"]}
    same = {"image": torch.zeros(2, 3), "names": ["a", "b"]}
    assert content_of(batch) == content_of(same)
    others = (
        {"image": torch.zeros(3, 2), "names": ["a", "b"]},
        {"image": torch.ones(2, 3), "names": ["a", "b"]},
        {"image": torch.zeros(2, 3, dtype=torch.int32), "names": ["a", "b"]},
        {"image": torch.zeros(2, 3), "names": ["a", "c"]},
    )
    assert all(content_of(batch) != content_of(one) for one in others)
