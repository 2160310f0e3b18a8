"""A DataLoader for each rank, with a sampler that forgets nothing: no epoch, no sample, no seed."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from torchmuster.errors import Impossible
from torchmuster.train.data.order import Order
from torchmuster.train.legacy.presence import present_world
from torchmuster.train.seeds import seed_process, worker_seed

# So many places are turned into samples together; the whole order is never held.
_AT_ONCE = 4096


class EachSampleOnce(DistributedSampler[Any]):
    """Gives this rank its samples, none of them twice, in another order each time it is iterated.

    The samples of all ranks' n-th batches together are the n-th batch of one process with the whole
    batch. ``set_epoch`` may be called, but need not be: epochs are counted by themselves.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        super().__init__(dataset, world_size, rank, shuffle=shuffle, seed=seed)
        size = len(dataset)  # type: ignore[arg-type]  # a map-style dataset has a length
        tail = size % (batch_size * world_size)
        # Fewer samples than ranks cannot be a batch of each rank. In training they wait for another
        # epoch, when they come earlier; without shuffling they would never come, so some ranks get
        # a batch more.
        self.total_size = size - tail if shuffle and tail < world_size else size
        self.num_samples = len(range(rank, self.total_size, world_size))
        self._size = size

    def __iter__(self) -> Iterator[int]:
        order = Order(size=self._size, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        self.epoch += 1  # unless set_epoch says otherwise before the next time
        for begin in range(self.rank, self.total_size, _AT_ONCE * self.num_replicas):
            end = min(self.total_size, begin + _AT_ONCE * self.num_replicas)
            places = torch.arange(begin, end, self.num_replicas)
            yield from order.samples_at(places).tolist()

    def __len__(self) -> int:
        return self.num_samples


def create_distributed_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    rank: int | None = None,
    world_size: int | None = None,
    shuffle: bool = True,
    *,
    seed: int = 0,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader of this rank's share of a dataset; ``batch_size`` is that of one rank.

    All ranks have the same number of batches, and no sample is given twice: sizes of the last batches may
    differ by one. The order changes with each epoch by itself. Where fewer samples than ranks are
    left over, they are left out of this epoch; with ``shuffle=False``, for evaluation, they are not,
    and some ranks have a batch more. Workers of different ranks draw different random numbers.
    ``options`` are any others of torch's DataLoader: ``num_workers``, ``drop_last``, ``collate_fn`` …
    Rank and number of ranks are those of the group, if not given.
    """
    if rank is None or world_size is None:
        world = present_world(rank, world_size)
        rank, world_size = world.global_rank, world.world_size
    size = len(dataset)  # type: ignore[arg-type]
    if shuffle and size < world_size:
        raise Impossible(
            f"{size} samples cannot be dealt out to {world_size} ranks",
            why="in training each rank must have a batch whenever the others have one",
            fix=f"start at most {size} ranks, or take a larger dataset",
        )
    sampler = EachSampleOnce(
        dataset,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
    )
    options["worker_init_fn"] = partial(
        _seed_worker, sampler, rank, seed, options.get("worker_init_fn")
    )
    options.setdefault("pin_memory", torch.accelerator.is_available())
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


def _seed_worker(
    sampler: EachSampleOnce,
    rank: int,
    seed: int,
    then: Callable[[int], None] | None,
    worker: int,
) -> None:
    """Seed a worker by rank and epoch; torch's own seeds are the same on ranks seeded alike."""
    # A worker starts, with its copy of the sampler, before the epoch's first sample is asked for.
    seed_process(worker_seed(seed, rank=rank, worker=worker, epoch=sampler.epoch))
    if then is not None:
        then(worker)
