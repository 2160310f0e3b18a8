"""Loader workers stop when their rank stops them, not when all processes get SIGTERM.

torchrun and schedulers send SIGTERM to all processes of a rank. The rank then finishes its
step and saves, for which it still needs its workers.
"""

import multiprocessing
import os
import random
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, default_collate

from torchmuster.errors import Impossible
from torchmuster.train.seeds import derive_seed
from torchmuster.units import format_bytes, plural

_FIRST_TRY = 4  # workers to try first


class SampleRange(NamedTuple):
    """A micro-batch to read: these samples, of which the first ``samples`` count."""

    epoch: int
    indices: list[int]
    samples: int


class SampleReader:
    """Reads a portion as a batch."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        random_per_sample: bool,
    ) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._seed = seed
        self._random_per_sample = random_per_sample
        self._tensors = _whole_tensors(dataset) if collate is None else None

    def read(self, portion: SampleRange) -> Any:
        """Return the batch of these samples."""
        if self._tensors is not None:
            index = torch.frombuffer(array("q", portion.indices), dtype=torch.int64)
            return [tensor.index_select(0, index) for tensor in self._tensors]
        if self._random_per_sample:
            return self._collate(self._with_own_random_numbers(portion))
        many = getattr(self._dataset, "__getitems__", None)
        return self._collate((many or self._one_by_one)(portion.indices))

    def _one_by_one(self, indices: Sequence[int]) -> list[Any]:
        samples = []
        dataset = self._dataset
        for index in indices:
            try:
                samples.append(dataset[index])
            except Exception as error:
                error.add_note(f"while reading sample {index} of {type(dataset).__name__}")
                raise
        return samples

    def _with_own_random_numbers(self, portion: SampleRange) -> list[Any]:
        samples = []
        with random_numbers_kept():
            for index in portion.indices:
                seed_cpu(derive_seed(self._seed, "sample", portion.epoch, index))
                samples += self._one_by_one([index])
        return samples


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the previous random states of Python, torch (CPU) and numpy."""
    numpy = sys.modules.get("numpy")
    python, torchs = random.getstate(), torch.get_rng_state()
    numpys = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpy and numpys is not None:
            numpy.random.set_state(numpys)


def seed_cpu(seed: int) -> None:
    """Seed the random states that datasets use; not the accelerators, which the model uses."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _whole_tensors(dataset: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a plain TensorDataset, whose rows can be indexed at once."""
    if type(dataset) is not TensorDataset:
        return None
    simple = all(
        one.device.type == "cpu" and one.layout == torch.strided for one in dataset.tensors
    )
    return dataset.tensors if simple else None


FOLDER = "/dev/shm"  # noqa: S108

_FIX = """docker run --shm-size=8g …  # or --ipc=host
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]  # Kubernetes, mounted at /dev/shm
use fewer workers, smaller micro-batches, or workers=0, which needs no shared memory"""


def free_shared_memory(folder: str = FOLDER) -> int | None:
    """Return the free bytes of shared memory; None without such a folder (macOS, Windows)."""
    try:
        room = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return room.f_frsize * room.f_bavail


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Free shared memory before the workers started, and the processes that share it."""

    free_bytes: int | None
    workers: int  # of this rank
    batches: int  # of this rank, in flight at once
    ranks: int  # on this host

    def refusal(self, batch_bytes: int) -> Impossible | None:
        """Return an error if batches of this size do not fit; None if they do."""
        needed = batch_bytes * self.batches * self.ranks
        if self.free_bytes is None or needed <= self.free_bytes:
            return None
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} on this host"
        return Impossible(
            f"{FOLDER} is too small for {self.workers} loader worker{'s' if self.workers > 1 else ''}: "
            f"{format_bytes(needed)} needed, {format_bytes(self.free_bytes)} free",
            why=f"workers pass batches through it: {format_bytes(batch_bytes)} per batch x "
            f"{self.batches} in flight x {ranks}; if it is full, workers die with “Bus error”",
            fix=_FIX,
        )


_LOOK_EVERY_S = 5.0
_SAVED_WITHIN_S = 30.0  # how long a stopping rank needs its workers, at most


class IgnoreSignalsInWorkers:
    """A ``worker_init_fn`` for a DataLoader that then calls another one."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Prepare a worker process."""
        ignore_signals_in_workers()
        if self._then is not None:
            self._then(worker)


def ignore_signals_in_workers() -> None:
    """Make a worker exit on SIGTERM only if its rank sent it or has exited."""
    # Not the parent process, which differs under forkserver.
    rank = multiprocessing.parent_process()
    if rank is None or not hasattr(signal, "sigtimedwait"):  # only Linux reports the sender
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A library may have started a thread before; the sender of its signals is unknown.
    signal.signal(signal.SIGTERM, _end_later)
    # Blocked in all other threads, so that the waiting thread gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_later(*_: object) -> None:
    timer = threading.Timer(_SAVED_WITHIN_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end_with(rank: BaseProcess) -> None:
    while True:
        heard = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S)
        if (heard is not None and heard.si_pid == rank.pid) or not rank.is_alive():
            os._exit(0)  # as torch's own handler does, so that it does not count as a failure


def advise_workers(*, workers: int, cores: int, ranks: int) -> str:
    """Return the number of workers to try for slow data; ``cores`` are shared by ``ranks``."""
    workers_per_rank = max(1, cores // ranks)
    shared = f"{plural(cores, 'core')} / {plural(ranks, 'rank')}"
    if workers < workers_per_rank:
        next_try = min(workers_per_rank, max(2 * workers, _FIRST_TRY))
        return f"workers {workers} -> try {next_try} ({shared})"
    return (
        f"{workers} worker{'s' if workers > 1 else ''} already use all cores ({shared}): make a "
        "sample cheaper to read (decode, resize and tokenize once, beforehand), or read from a faster disk"
    )
