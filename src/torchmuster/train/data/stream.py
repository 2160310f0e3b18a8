"""Steps from data that can only be read in sequence, on one number of ranks."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.batch_split import split_batch
from torchmuster.train.data.dataloader_adapter import BLOCK_STEPS, Batch, DataLoaderAdapter
from torchmuster.train.data.worker_processes import IgnoreSignalsInWorkers
from torchmuster.train.seeds import derive_seed
from torchmuster.train.world import World


class StreamLoader(DataLoaderAdapter):
    """Yields each rank's part of each global batch of an iterable dataset.

    A rank reads its own share: that of ``dataset.share(rank, ranks)``, of ``split_dataset_by_node``
    for a Hugging Face stream, else each Nth sample. A position is restored on the same number of
    ranks, by the dataset's ``state_dict`` if it has one, else by skipping samples. ``shuffle``
    mixes the samples of 8 steps. With ``workers``, one process reads ahead.

    A rank whose share ends earlier computes a sample with weight 0 until all shares end.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> None:
        if isinstance(dataset, Iterator):
            raise Impossible(
                f"the data is {type(dataset).__name__}, which can be read only once",
                why="each epoch and each resume reads from the beginning",
                fix="return a dataset with __iter__",
            )
        self.portions = split_batch(
            world.world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        )
        ranks, whole = world.world_size, self.portions.global_batch_size
        own, rest = divmod(whole, ranks)
        if rest:
            raise Impossible(
                f"a global batch of {whole} samples cannot be divided among {ranks} ranks that read a stream",
                why="each rank reads its own share, and as many samples as the others in each step",
                fix=f"use a multiple of {ranks} as the global batch size, or another number of ranks",
            )
        rounds = self.portions.rounds
        while own % rounds:  # micro-batches of one size, at most the requested one
            rounds += 1
        super().__init__((), world, accumulation=rounds)
        self._sizes = self._sizes._replace(batches=None)
        self._nominal_samples = whole
        self.workers = min(workers, 1)
        self._dataset = dataset
        self._own = own
        self._seed = seed
        self._shuffle = shuffle
        self._collate = collate or getattr(dataset, "collate", None) or default_collate

    def _read(self, begin: tuple[int, int, Any]) -> Iterator[Batch]:
        epoch, _, position = begin
        samples = Share(
            self._dataset,
            self._world,
            epoch=epoch,
            position=position,
            block=BLOCK_STEPS * self._own,
            seed=derive_seed(self._seed, "block", epoch) if self._shuffle else None,
        )
        loader: DataLoader[Any] = DataLoader(
            samples,
            batch_size=self._own // self._accumulation,
            num_workers=self.workers,
            collate_fn=Collated(self._collate),
            worker_init_fn=IgnoreSignalsInWorkers() if self.workers else None,
            generator=torch.Generator().manual_seed(self._seed),
        )
        return iter(loader)


class Collated:
    """The ``collate_fn``: a batch of samples with the position after the last one, or their error."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[Any, Any]]) -> Batch:
        """Return the batch."""
        last, position = samples[-1]
        if isinstance(last, MusterError):
            return Batch(None, 0, position, str(last))
        return Batch(self._collate([sample for sample, _ in samples]), len(samples), position)


class Share(torch.utils.data.IterableDataset[tuple[Any, Any]]):
    """What one rank reads of an iterable dataset from a position on: samples, each with the position after it.

    Samples are read in blocks; a position names a block and how many of its samples were used.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        epoch: int,
        position: Any,
        block: int,
        seed: int | None,
    ) -> None:
        rank, ranks = world.global_rank, world.world_size
        self._stride = slice(None)
        if hasattr(dataset, "share"):
            dataset = dataset.share(rank, ranks)
        elif is_hugging_face_stream(dataset):
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, ranks)
        else:
            self._stride = slice(rank, None, ranks)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._dataset = dataset
        self._has_state = hasattr(dataset, "state_dict") and self._stride == slice(None)
        self._position = position or {"block": 0, "before": None, "used": 0}
        self._block = block
        self._mixing = (seed, rank)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number, before, used = (self._position[name] for name in ("block", "before", "used"))
        skipped = 0
        if before is not None and self._has_state:
            self._dataset.load_state_dict(before)
        elif before is not None:
            skipped = before
        samples = islice(iter(self._dataset), self._stride.start, None, self._stride.step)
        samples = islice(samples, skipped, None)
        while True:
            block = []
            error = None
            try:
                for sample in islice(samples, self._block):
                    block.append(sample)
            except MusterError as caught:
                error = caught
            seed, rank = self._mixing
            if seed is not None:
                random.Random(derive_seed(seed, rank, number)).shuffle(block)
            for place in range(used, len(block)):
                yield block[place], {"block": number, "before": before, "used": place + 1}
            if error is not None:
                yield error, None
            if len(block) < self._block:
                return
            skipped += len(block)
            before = self._dataset.state_dict() if self._has_state else skipped
            number += 1
            used = 0


def is_hugging_face_stream(dataset: Any) -> bool:
    """Return whether this is a ``datasets.IterableDataset``."""
    return (
        hasattr(dataset, "num_shards")
        and hasattr(dataset, "shard")
        and not hasattr(dataset, "__len__")
    )
