"""DataLoaders for each rank, with a sampler that handles epochs, seeds and the last batch."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from torchmuster.errors import Impossible
from torchmuster.train.data.order import sample_order
from torchmuster.train.seeds import seed_process, worker_seed
from torchmuster.train.world import World, join_world, most_exact_type, sum_over_ranks

_AT_ONCE = 4096  # samples whose numbers are made Python's at a time


def present_world(rank: int | None = None, world_size: int | None = None) -> World:
    """Return this process's ``World`` in the existing group; without a group, a world of one.

    Rejects a rank or number of ranks that contradicts the group.
    """
    world = World(
        global_rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        device=_own_device(),
        backend="",
    )
    if dist.is_initialized():
        with join_world() as world:  # created elsewhere, so it is not destroyed here
            pass
    own = (world.global_rank, world.world_size)
    wanted = (own[0] if rank is None else rank, own[1] if world_size is None else world_size)
    if wanted != own:
        raise Impossible(
            f"rank {wanted[0]} of {wanted[1]} was given, but this process is rank {own[0]} of {own[1]}",
            why="" if world.backend else "there is no process group",
            fix="call setup_distributed(rank, world_size) first (torchmuster.distributed), with these values",
        )
    return world


def _own_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


Value = TypeVar("Value", float, torch.Tensor)


def reduce_mean(value: Value, world_size: int | None = None) -> Value:
    """Return the mean of a number or tensor over all ranks; the argument is not changed.

    Sums are computed in double precision. A floating tensor keeps its dtype and device; an integer
    tensor gives torch's default floating dtype. Without a group it is the value itself. It is the
    mean over *ranks*: where ranks hold means over different numbers of samples, reduce the sums and
    the counts instead, and divide.
    """
    world = present_world(world_size=world_size)
    if not isinstance(value, torch.Tensor):
        return sum_over_ranks([value], world)[0] / world.world_size
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    mean = value.detach().to(world.device, most_exact_type(world.device), copy=True)
    if world.world_size > 1:
        dist.all_reduce(mean)
    return (mean / world.world_size).to(value.device, dtype)


def sync_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks: like DDP, but after the backward.

    For a model without a wrapper, and to show what DDP does. A gradient that exists on some ranks
    only counts as 0 on the others.
    """
    world = present_world()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise Impossible(
            "sync_gradients cannot average sharded gradients: FSDP has averaged them already",
            fix="remove the call",
        )
    holders = sum_over_ranks([float(parameter.grad is not None) for parameter in parameters], world)
    for parameter, ranks in zip(parameters, holders, strict=True):
        if ranks == 0 or world.world_size == 1:
            continue  # unused everywhere: an optimizer must not see it
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.world_size


class EachSampleOnce(DistributedSampler[Any]):
    """Yields this rank's samples, none of them twice, in a new order each time it is iterated.

    The samples of all ranks' n-th batches together are the n-th batch of one process with the whole
    batch. Calling ``set_epoch`` is optional: epochs are counted automatically.
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
        # Fewer samples than ranks cannot give each rank a batch. In training they are used in
        # another epoch, when they come earlier; without shuffling they would never be used, so some
        # ranks get one more batch.
        self.total_size = size - tail if shuffle and tail < world_size else size
        self.num_samples = len(range(rank, self.total_size, world_size))
        self._size = size

    def __iter__(self) -> Iterator[int]:
        order = sample_order(self._size, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        self.epoch += 1  # unless set_epoch says otherwise before the next time
        own = order[self.rank : self.total_size : self.num_replicas]
        for samples in torch.split(own, _AT_ONCE):
            yield from samples.tolist()

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
    """Return a DataLoader of this rank's share of a dataset; ``batch_size`` is per rank.

    All ranks have the same number of batches, and no sample is used twice: sizes of the last
    batches may differ by one. The order changes with each epoch automatically. If fewer samples
    than ranks remain, they are skipped in this epoch; with ``shuffle=False``, for evaluation, they
    are not, and some ranks have one more batch. Workers of different ranks draw different random
    numbers. ``options`` are other options of torch's DataLoader: ``num_workers``, ``drop_last``,
    ``collate_fn`` … Rank and number of ranks default to the group's.
    """
    if rank is None or world_size is None:
        world = present_world(rank, world_size)
        rank, world_size = world.global_rank, world.world_size
    size = len(dataset)  # type: ignore[arg-type]
    if shuffle and size < world_size:
        raise Impossible(
            f"cannot split {size} samples among {world_size} ranks",
            why="in training each rank must have a batch whenever the others have one",
            fix=f"start at most {size} ranks, or use a larger dataset",
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
    """Seed a worker by rank and epoch; torch's own seeds are equal on ranks with equal seeds."""
    # A worker starts, with its copy of the sampler, before the epoch's first sample is requested.
    seed_process(worker_seed(seed, rank=rank, worker=worker, epoch=sampler.epoch))
    if then is not None:
        then(worker)
