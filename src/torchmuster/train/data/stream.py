"""Steps from data that can only be read in sequence, on one number of ranks."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.batch_split import split_batch
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.data.worker_processes import IgnoreSignalsInWorkers
from torchmuster.train.seeds import derive_seed
from torchmuster.train.world import World, all_gather_object

BLOCK_STEPS = 8  # read, shuffled and counted together


class Block(NamedTuple):
    """This rank's micro-batches of some steps."""

    batches: list[Any]
    samples: int
    before: Any  # the position of the data at the begin of the block
    error: str = ""


class StreamLoader:
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
        accumulation: int | None = None,
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
            accumulation=accumulation,
        )
        if self.portions.global_batch_size < world.world_size:
            raise Impossible(
                f"a global batch of {self.portions.global_batch_size} samples is too small for "
                f"{world.world_size} ranks that read a stream",
                why="each rank reads its own share, at least one sample per step",
                fix=f"use a global batch size of at least {world.world_size}, or fewer ranks",
            )
        self.workers = min(workers, 1)
        self._dataset = dataset
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._collate = collate or getattr(dataset, "collate", None) or default_collate
        self._position: dict[str, Any] = {"epoch": 0, "blocks": 0, "steps": 0, "before": None}
        self._resume: dict[str, Any] | None = None

    def steps_in_epoch(self) -> int | None:
        """Return None: the number of steps is known only at the end of the stream."""
        return None

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch; after :meth:`restore`, from the restored position on."""
        position = self._resume
        self._resume = None
        if begin or position is None or position["epoch"] != epoch:
            position = {"epoch": epoch, "blocks": 0, "steps": 0, "before": None}
        steps = self._steps(position)
        next(islice(steps, begin, begin), None)
        return steps

    def _steps(self, position: dict[str, Any]) -> Iterator[Step]:
        epoch, number = position["epoch"], position["blocks"] * BLOCK_STEPS
        before = position["before"]
        own_before = None if before is None else before[self._world.global_rank]
        self._position = {**position, "before": own_before}
        sizes = [self._sizes(rank) for rank in range(self._world.world_size)]
        rounds = len(sizes[0])
        spare: list[Any] = []
        for blocks, block in enumerate(self._blocks(position), start=position["blocks"]):
            spare = block.batches[-1:] or spare
            totals = self._exchange(block, has_batch=bool(spare))
            if not any(totals):
                break
            batches = iter(block.batches)
            longest = max(-(-total // sum(own)) for total, own in zip(totals, sizes, strict=True))
            done = position["steps"] if blocks == position["blocks"] else 0
            for step in range(longest):
                counts = [
                    min(max(total - step * sum(own), 0), sum(own))
                    for total, own in zip(totals, sizes, strict=True)
                ]
                micro_batches = self._micro_batches(batches, counts[self._world.global_rank], spare)
                self._position = {
                    "epoch": epoch,
                    "blocks": blocks,
                    "steps": step + 1,
                    "before": block.before,
                }
                if step >= done:
                    yield Step(
                        epoch=epoch,
                        number=number,
                        rounds=rounds,
                        samples=sum(counts),
                        nominal_samples=self.portions.global_batch_size,
                        micro_batches=micro_batches,
                    )
                number += 1
        self._position = {"epoch": epoch + 1, "blocks": 0, "steps": 0, "before": None}

    def _sizes(self, rank: int) -> list[int]:
        """Return the sizes of a rank's micro-batches in a full step."""
        slices = self.portions.slices(self.portions.global_batch_size, rank)
        return [part.stop - part.start for part in slices]

    def _micro_batches(
        self, batches: Iterator[Any], samples: int, spare: list[Any]
    ) -> list[MicroBatch]:
        device = self._world.device
        micro_batches = []
        for size in self._sizes(self._world.global_rank):
            counted = min(size, samples)
            samples -= counted
            batch = next(batches) if counted else spare[0]
            if device.type != "cpu":
                batch = move_to_device(batch, device, pin=device.type == "cuda")
            micro_batches.append(MicroBatch(batch=batch, samples=counted))
        return micro_batches

    def _blocks(self, position: dict[str, Any]) -> Iterator[Block]:
        rank = self._world.global_rank
        before = position["before"]
        blocks = Blocks(
            self._dataset,
            rank=rank,
            ranks=self._world.world_size,
            sizes=self._sizes(rank),
            epoch=position["epoch"],
            first=position["blocks"],
            before=None if before is None else before[rank],
            seed=self._seed if self._shuffle else None,
            collate=self._collate,
        )
        if not self.workers:
            return iter(blocks)
        loader: DataLoader[Block] = DataLoader(
            blocks,
            batch_size=None,
            num_workers=1,
            worker_init_fn=IgnoreSignalsInWorkers(),
            generator=torch.Generator().manual_seed(self._seed),
        )
        return iter(loader)

    def _exchange(self, block: Block, *, has_batch: bool) -> list[int]:
        """Return the numbers of samples of all ranks; an error of one rank raises on all."""
        reports = all_gather_object([block.samples, has_batch, block.error], self._world)
        for rank, (_, _, error) in enumerate(reports):
            if error:
                raise MusterError(
                    f"rank {rank} could not read its data: {error}", fix="fix or remove the record"
                )
        empty = [rank for rank, (_, ready, _) in enumerate(reports) if not ready]
        if empty and len(empty) < len(reports):
            raise Impossible(
                f"rank {empty[0]} has no sample at all",
                why="an idle rank needs a sample to take part in the other ranks' steps",
                fix="provide at least one sample for each rank, or use fewer ranks",
            )
        return [samples for samples, _, _ in reports]

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step; all ranks call it."""
        before = all_gather_object(self._position["before"], self._world)
        return {
            **self._position,
            "before": before,
            "global_batch_size": self.portions.global_batch_size,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the last yielded step, on the same number of ranks."""
        if len(state["before"]) != self._world.world_size:
            raise Impossible(
                f"the position of the stream was saved by {len(state['before'])} ranks, and there "
                f"are {self._world.world_size} now",
                why="each rank of a stream reads its own share",
                fix="resume on the same number of ranks, or use data that is not streamed",
            )
        if state["global_batch_size"] != self.portions.global_batch_size:
            raise Impossible(
                f"the position of the stream was saved with a global batch of "
                f"{state['global_batch_size']} samples, not {self.portions.global_batch_size}",
                fix="keep the global batch size",
            )
        names = ("epoch", "blocks", "steps", "before")
        self._resume = {name: state[name] for name in names}
        own = state["before"][self._world.global_rank]
        self._position = {**self._resume, "before": own}


class Blocks(torch.utils.data.IterableDataset[Block]):
    """The blocks of one rank and epoch, read in this process or in a worker."""

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int,
        ranks: int,
        sizes: list[int],
        epoch: int,
        first: int,
        before: Any,
        seed: int | None,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._share = Share(dataset, rank, ranks, epoch, before)
        self._sizes = sizes
        self._number = first
        self._keys = (epoch, rank)
        self._seed = seed
        self._collate = collate

    def __iter__(self) -> Iterator[Block]:
        samples = iter(self._share)
        while True:
            before = self._share.state()
            try:
                block = list(islice(samples, BLOCK_STEPS * sum(self._sizes)))
            except MusterError as error:
                yield Block([], 0, before, str(error))
                return
            if self._seed is not None:
                mixer = random.Random(derive_seed(self._seed, "block", *self._keys, self._number))
                mixer.shuffle(block)
            self._number += 1
            yield Block(list(self._batches(block)), len(block), before)

    def _batches(self, samples: list[Any]) -> Iterator[Any]:
        rest = iter(samples)
        for _ in range(BLOCK_STEPS):
            for size in self._sizes:
                batch = list(islice(rest, size))
                if batch:
                    yield self._collate(batch)


class Share:
    """What one rank reads of an iterable dataset, from a position on."""

    def __init__(self, dataset: Any, rank: int, ranks: int, epoch: int, state: Any) -> None:
        self._stride = slice(None)
        self._skip = 0
        if hasattr(dataset, "share"):
            dataset = dataset.share(rank, ranks)
        elif is_hugging_face_stream(dataset):
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, ranks)
        else:
            self._stride = slice(rank, None, ranks)
        self._dataset = dataset
        self._has_state = hasattr(dataset, "state_dict") and self._stride == slice(None)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if state is not None and self._has_state:
            dataset.load_state_dict(state)
        elif state is not None:
            self._skip = state
        self._read = self._skip
        self._begin = state

    def state(self) -> Any:
        """Return the position after the last sample."""
        if self._read == self._skip:
            return self._begin  # a dataset reports what it loaded only once it is read
        return self._dataset.state_dict() if self._has_state else self._read

    def __iter__(self) -> Iterator[Any]:
        samples = islice(iter(self._dataset), self._stride.start, None, self._stride.step)
        for sample in islice(samples, self._skip, None):
            self._read += 1
            yield sample


def is_hugging_face_stream(dataset: Any) -> bool:
    """Return whether this is a ``datasets.IterableDataset``."""
    return (
        hasattr(dataset, "num_shards")
        and hasattr(dataset, "shard")
        and not hasattr(dataset, "__len__")
    )
