"""Record at which place of which iteration of a DataLoader a script is, and how workers are seeded."""

import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch.utils.data import DataLoader, RandomSampler

from torchmuster.prove.probes.fingerprints import random_states
from torchmuster.prove.probes.replacing import replace
from torchmuster.prove.records import EventRecord
from torchmuster.prove.torch_private import LoaderIterator


class LoaderWatch:
    """Knows the ``place``: (loader, its iteration, position in it) of the batch that was read last."""

    def __init__(self, into: str, event: Callable[..., None]) -> None:
        self.place: tuple[int, int, int] | None = None
        self._into, self._event = into, event
        self._loaders: list[Any] = []
        self._iterations: list[int] = []  # of each loader, from 0
        # Of each iterator, which a loader with persistent workers uses again.
        self._places: weakref.WeakKeyDictionary[Any, tuple[int, int, int]]
        self._places = weakref.WeakKeyDictionary()

    def install(self, is_mine: Callable[[], bool]) -> None:
        """Install the hooks, which act in the training thread."""
        replace(DataLoader, "__iter__", self._begin, when=is_mine)
        replace(LoaderIterator, "__next__", self._next, when=is_mine)

    def _begin(self, usual: Any, loader: Any) -> Any:
        if loader not in self._loaders:
            self._loaders.append(loader)
            self._iterations.append(-1)
            self._event("loader", shuffles=_shuffles(loader), loader=len(self._loaders) - 1)
        number = self._loaders.index(loader)
        self._iterations[number] += 1
        iteration = self._iterations[number]
        if loader.num_workers:
            own = loader.worker_init_fn
            if isinstance(own, functools.partial) and own.func is init_worker:
                own = own.args[0]
            loader.worker_init_fn = functools.partial(
                init_worker, own, self._into, number, iteration
            )
        iterator = usual(loader)
        self._places[iterator] = (number, iteration, -1)
        return iterator

    def _next(self, usual: Any, iterator: Any) -> Any:
        batch = usual(iterator)
        if iterator in self._places:
            number, iteration, position = self._places[iterator]
            self.place = self._places[iterator] = (number, iteration, position + 1)
        return batch


def _shuffles(loader: Any) -> bool:
    batches = loader.batch_sampler
    inner = getattr(batches, "batch_sampler", None)  # Accelerate's shards
    for owner in (loader, batches, inner):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True:
            return True
    return False


def init_worker(
    own: Callable[[int], None] | None, into: str, loader: int, iteration: int, worker: int
) -> None:
    """Initialize a worker as the script does, and then record its random states."""
    if own is not None:
        own(worker)
    event = EventRecord(kind="worker", step=iteration, loader=loader, random=random_states())
    path = Path(into) / f"rank-{os.environ.get('RANK', '0')}.workers.jsonl"
    with path.open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")
