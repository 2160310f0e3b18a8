"""Loops that read batches on real ranks."""

import multiprocessing
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

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


def _described(loader: DataLoaderAdapter, epoch: int, begin: int = 0) -> list[Any]:
    return [
        (
            step.number,
            step.rounds,
            step.samples,
            step.nominal_samples,
            [(micro.samples, micro.batch[0].tolist()) for micro in step],
        )
        for step in loader.epoch(epoch, begin=begin)
    ]


def foreign(world: World) -> dict[str, Any]:
    """Read foreign DataLoaders of all kinds; return what came."""
    rank, ranks = world.global_rank, world.world_size
    found: dict[str, Any] = {}
    rows = TensorDataset(torch.arange(22))
    sampler: DistributedSampler[Any] = DistributedSampler(rows, ranks, rank, seed=1)
    loader = DataLoaderAdapter(
        DataLoader(rows, batch_size=4, sampler=sampler), world, accumulation=2
    )
    found["known"] = _described(loader, 0)
    found["next epoch"] = _described(loader, 1)
    found["steps"] = loader.steps_in_epoch()
    resumed = DataLoaderAdapter(
        DataLoader(rows, batch_size=4, sampler=sampler), world, accumulation=2
    )
    resumed.restore({"epoch": 1, "step": 1})
    found["resumed"] = _described(resumed, 1)

    own = TensorDataset(torch.arange(8 - rank))
    unlike = DataLoader(own, batch_sampler=[[0, 1, 2 + rank], [3]])
    found["own batches"] = _described(DataLoaderAdapter(unlike, world), 0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        uneven = DataLoaderAdapter(DataLoader(TensorDataset(torch.arange(13 - rank))), world)
        found["warned"] = [str(one.message) for one in caught]
        try:
            uneven.epoch(0)
        except MusterError as error:
            found["uneven"] = error.what
        streams = {"stream": 9 - 3 * rank, "empty": 0, "empty rank": 3 - 3 * rank}
        for name, count in streams.items():
            stream = DataLoaderAdapter(
                DataLoader(Stream(count), batch_size=2), world, accumulation=2
            )
            try:
                found[name] = [
                    (step.number, step.rounds, step.samples, [micro.samples for micro in step])
                    for step in stream.epoch(0)
                ]
            except MusterError as error:
                found[name] = str(error)
    return found


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
