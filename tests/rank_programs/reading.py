"""Loops that read batches on real ranks."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rank_programs.small_models import data, seeded_model
from torchmuster.errors import MusterError
from torchmuster.train.data.dataloader_adapter import DataLoaderAdapter, refuse_uneven_ranks
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import Loader
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.world import World, all_gather_object


class Stream(IterableDataset[int]):
    """So many numbers, and no length."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))


def compare(world: World, counts: list[int]) -> tuple[str | None, int]:
    """Compare counts; then use the group once more, which must still be in step."""
    told = None
    try:
        refuse_uneven_ranks(all_gather_object(counts[world.global_rank], world))
    except MusterError as error:
        told = str(error)
    after = torch.ones(())
    dist.all_reduce(after)
    return told, int(after)


def indices_read(world: World, state: dict[str, Any] | None, steps: int | None) -> Any:
    """Read an epoch, or some steps of it, with workers; return the position and each step's samples."""
    # These ranks come from a fork server, whose children would start one of their own for their workers.
    multiprocessing.set_start_method("fork", force=True)
    rows = TensorDataset(torch.arange(50))
    loader = BatchLoader(
        rows, world, global_batch_size=12, micro_batch_size=3, seed=7, workers=1, shuffle=True
    )
    if state is not None:
        loader.restore(state)
    seen: list[list[int]] = []
    for step in loader.epoch(1):
        seen.append([int(one) for micro in step for one in micro.batch[0][: micro.samples]])
        if len(seen) == steps:
            break
    told = loader.state()
    loader.close()
    return told, seen


def trained(world: World, kind: str) -> list[float]:
    """Train two epochs on 17 samples with portions of different sizes; return the weights."""
    rank = world.global_rank
    dataset = TensorDataset(*data(17))
    loader: Loader
    if kind == "batches":
        loader = BatchLoader(dataset, world, global_batch_size=12, micro_batch_size=2, seed=2)
    else:  # global batches of 12 and 5 samples: as many batches on each rank, none of them alike
        own = [[[0, 1, 2, 3, 4], [12, 13, 14]], [[5, 6, 7], [15]], [[8, 9, 10, 11], [16]]]
        loader = DataLoaderAdapter(DataLoader(dataset, batch_sampler=own[rank]), world)
    strategy = Ddp(world)
    model = strategy.prepare(seeded_model())
    update = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, world)
    for epoch in range(2):
        for step in loader.epoch(epoch):
            for micro in update.accumulate(step):
                inputs, targets = micro.batch
                update.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            update.apply()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
