"""Processes that read ahead of the training loop: torch's DataLoader, given one micro-batch at a time."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchmuster.errors import Impossible
from torchmuster.train.data.nested import tensors_in
from torchmuster.train.data.reading import Portion, Reader
from torchmuster.train.data.shared_memory import Room, free_bytes
from torchmuster.train.data.worker_signals import HeedingOnlyTheRank
from torchmuster.train.seeds import derive, seed_process
from torchmuster.train.torch_private import stop_workers

PREFETCH = 2  # batches that each worker has ready; torch's default


class Workers:
    """Worker processes that live for as many epochs as are read."""

    def __init__(
        self,
        reader: Reader,
        count: int,
        *,
        seed: int,
        local_ranks: int,
        pin_memory: bool,
        prefetch: int = PREFETCH,
    ) -> None:
        room = Room(
            free_bytes=free_bytes(), workers=count, batches=count * prefetch, ranks=local_ranks
        )
        self._upcoming = _Upcoming()
        self._batches: DataLoader[Any] = DataLoader(
            _Worker(reader, seed, room),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._upcoming,
            collate_fn=_as_it_is,
            num_workers=count,
            prefetch_factor=prefetch,
            persistent_workers=True,
            pin_memory=pin_memory,
            worker_init_fn=HeedingOnlyTheRank(),
            # Without one it would take a number from the process's own, as often as an epoch begins.
            generator=torch.Generator().manual_seed(seed),
        )

    def read(self, portions: Iterator[Portion]) -> Iterator[tuple[Portion, Any]]:
        """Yield each portion with its batch, in order."""
        upcoming = self._upcoming
        upcoming.portions = mine = portions
        upcoming.asked.clear()
        try:
            for batch in self._batches:
                if isinstance(batch, Impossible):
                    raise batch
                yield upcoming.asked.popleft(), batch
                if upcoming.portions is not mine:
                    raise Impossible(
                        "two epochs of one loader were read at the same time",
                        why="its workers read for one of them",
                        fix="read one to its end or leave it before the next, or make a second loader",
                    )
        finally:
            if upcoming.portions is mine:
                upcoming.portions = iter(())

    def close(self) -> None:
        """End the processes, also while somebody still holds an epoch that was not read to its end."""
        # torch by itself stops them when the last reference is gone, and a traceback has one.
        stop_workers(self._batches)


class _Upcoming:
    """What the workers read next. DataLoader asks for it ahead of what it gives back."""

    def __init__(self) -> None:
        self.portions: Iterator[Portion] = iter(())
        self.asked: deque[Portion] = deque()

    def __iter__(self) -> Iterator[Portion]:
        for portion in self.portions:
            self.asked.append(portion)
            yield portion


class _Worker:
    """What a worker process has for a dataset: its items are micro-batches."""

    def __init__(self, reader: Reader, seed: int, room: Room) -> None:
        self._reader = reader
        self._seed = seed
        self._room = room
        self._largest_bytes = 0

    def __getitem__(self, portion: Portion) -> Any:
        """Read a batch. Where there is no room to hand it over, the refusal is returned.

        Raised, it would come out of torch with another text around it.
        """
        # By what is read, not by who reads it: a run that goes on from here draws the same.
        seed_process(derive(self._seed, "batch", portion.epoch, portion.indices[0]))
        batch = self._reader.read(portion)
        return self._refusal(batch) or batch

    def _refusal(self, batch: Any) -> Impossible | None:
        size = sum(tensor.nbytes for tensor in tensors_in(batch) if tensor.device.type == "cpu")
        if size <= self._largest_bytes:
            return None
        self._largest_bytes = size
        return self._room.refusal(size)


def _as_it_is(batch: Any) -> Any:
    return batch
