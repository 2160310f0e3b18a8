"""Processes that read for a rank go on until their rank ends them."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from made_up_worlds import made_up_world
from patience import GIVE_UP_S
from torchmuster.train.data import worker_processes
from torchmuster.train.data.dataloader_adapter import DataLoaderAdapter
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.worker_processes import IgnoreSignalsInWorkers

pytestmark = pytest.mark.engine

ALONE = made_up_world()


class Pids(Dataset[int]):
    """Each sample is the number of the process that read it."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, place: int) -> int:
        time.sleep(0.001)
        return os.getpid()


@pytest.mark.parametrize("kind", ["ours", "the user's own"])
def test_a_signal_from_elsewhere_does_not_end_them(kind: str) -> None:
    if kind == "ours":
        ours = BatchLoader(Pids(), ALONE, global_batch_size=4, workers=1)
        _stands_signals(int(next(iter(step.micro_batches)).batch[0]) for step in ours.epoch(0))
        ours.close()
        _await_feeders()
        return
    called: list[int] = []
    loader = DataLoader(Pids(), batch_size=4, num_workers=1, worker_init_fn=called.append)
    steps = DataLoaderAdapter(loader, ALONE).epoch(0)
    _stands_signals(int(next(iter(step.micro_batches)).batch[0]) for step in steps)
    _await_feeders()
    DataLoaderAdapter(loader, ALONE)
    prepare = loader.worker_init_fn
    assert isinstance(prepare, IgnoreSignalsInWorkers)
    assert prepare._then == called.append  # once around it, however often it is used


def _stands_signals(pids: Iterator[int]) -> None:
    worker = next(pids)
    assert worker != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # By a child of this process: who sends it counts.
        if os.fork() == 0:
            os.kill(worker, number)
            os._exit(0)
        os.wait()
    rest = list(pids)
    assert len(rest) > 50
    assert set(rest) == {worker}


def test_they_end_with_a_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "_LOOK_EVERY_S", 0.1)
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=_read_for_ever, args=(theirs,))
    rank.start()
    theirs.close()  # the worker has the last end of it
    worker = ours.recv()
    assert worker != rank.pid
    rank.kill()
    rank.join(GIVE_UP_S)
    rank.close()
    assert ours.poll(GIVE_UP_S)
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()


def _read_for_ever(pipe: Any) -> None:
    loader = DataLoader(Pids(), num_workers=1, worker_init_fn=IgnoreSignalsInWorkers())
    reading = iter(loader)
    pipe.send(int(next(reading)))
    time.sleep(600)


def _await_feeders() -> None:
    """Wait for the threads that fed a worker: they end by themselves."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(GIVE_UP_S)
