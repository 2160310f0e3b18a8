"""``BatchLoader``: the same global batches on any number of ranks, resumed exactly in the middle of an epoch."""

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from torchmuster.errors import Impossible
from torchmuster.train.data.batch_split import BatchSplit, split_batch
from torchmuster.train.data.order import sample_order
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.data.worker_processes import IgnoreSignalsInWorkers
from torchmuster.train.seeds import derive_seed, seed_process
from torchmuster.train.torch_private import stop_workers
from torchmuster.train.world import World


class SampleRange(NamedTuple):
    """A micro-batch to read: these samples, of which the first ``samples`` count."""

    epoch: int
    indices: list[int]
    samples: int


class MicroBatches:
    """The micro-batches of a dataset, by their :class:`SampleRange`: what a DataLoader's workers read."""

    def __init__(
        self, dataset: Any, *, collate: Callable[[list[Any]], Any] | None, seed: int
    ) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._seed = seed
        self._tensors = _tensors(dataset) if collate is None else None

    def __getitems__(self, chosen: SampleRange) -> tuple[SampleRange, Any]:
        """Return the batch of these samples; DataLoader calls this with what its ``batch_sampler`` yields."""
        if get_worker_info() is not None:
            # By the samples, not by the worker: a resumed run draws the same numbers.
            seed_process(derive_seed(self._seed, "batch", chosen.epoch, chosen.indices[0]))
        if self._tensors is not None:
            index = torch.frombuffer(array("q", chosen.indices), dtype=torch.int64)
            return chosen, [tensor.index_select(0, index) for tensor in self._tensors]
        if hasattr(self._dataset, "__getitems__"):
            return chosen, self._collate(self._dataset.__getitems__(chosen.indices))
        return chosen, self._collate([self._read(index) for index in chosen.indices])

    def _read(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self._dataset).__name__}")
            raise


class BatchLoader:
    """Yields each rank's part of each global batch of a map-style dataset.

    The samples of a step depend on the seed, the epoch and the global batch size; never on the
    number of ranks, workers or micro-batches. The rest at the end of an epoch is a smaller step
    (``drop_tail`` skips it); a rank that gets none of it computes a sample with weight 0.

    ``global_batch_size`` is the number of samples of a step over all ranks. ``micro_batch_size`` is
    the number that a rank computes at once. ``collate`` makes a batch of a list of samples (default:
    torch's).

    ``workers`` are processes of torch's DataLoader that read ahead; their random numbers for a
    micro-batch depend on the seed, the epoch and the first sample of the micro-batch. Without workers,
    the dataset draws from this process's random states.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_tail: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> None:
        self.portions: BatchSplit = split_batch(
            world.world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        )
        self.workers = workers
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._size = _size_of(dataset)
        self._end = self._size
        if drop_tail:
            self._end -= self._size % self.portions.global_batch_size
        self._slices: dict[int, list[slice]] = {}  # of this rank, by the samples of a step
        self._identity = {"size": self._size, "seed": seed, "shuffle": shuffle}
        if hasattr(dataset, "identity"):  # it knows more about its content than its size
            self._identity["data"] = dataset.identity()
        self._micro_batches = MicroBatches(dataset, collate=collate, seed=seed)
        self._pins_memory = world.device.type == "cuda"
        self._dataloader: DataLoader[Any] | None = None
        self._sampler = Ranges()
        self._position = (0, 0)  # epoch, and how many of its samples were yielded
        self._resume: tuple[int, int] | None = None

    def steps_in_epoch(self) -> int:
        """Return how many steps an epoch has, the same on every rank."""
        return -(-self._end // self.portions.global_batch_size)

    def epoch(self, epoch: int) -> Generator[Step, None, None]:
        """Yield the steps of an epoch; after :meth:`restore`, those after the position, and read only them."""
        start = 0
        if self._resume is not None and self._resume[0] == epoch:
            start = self._resume[1]
        self._resume = None
        self._position = (epoch, start)
        return self._steps(epoch, start)

    def _steps(self, epoch: int, start: int) -> Generator[Step, None, None]:
        whole = self.portions.global_batch_size
        micro_batches = self._read(epoch, start)
        for number, begin in enumerate(range(start, self._end, whole), start=start // whole):
            samples = min(whole, self._end - begin)
            rounds = len(self._slices_of(samples))
            of_step = islice(micro_batches, rounds)
            self._position = (epoch, begin + samples)
            yield Step(
                epoch=epoch,
                number=number,
                rounds=rounds,
                samples=samples,
                nominal_samples=whole,
                micro_batches=of_step,
            )
            deque(of_step, maxlen=0)  # the unread rest does not belong to the next step

    def _read(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """Read this rank's micro-batches, from a position of the epoch on."""
        ranges = self._ranges(epoch, start)
        device = self._world.device
        if self.workers:
            batches = self._read_by_workers(ranges)
        else:
            batches = map(self._micro_batches.__getitems__, ranges)
        for chosen, batch in batches:
            if device.type != "cpu":  # what workers read is pinned already
                pin = self._pins_memory and not self.workers
                batch = move_to_device(batch, device, pin=pin)
            yield MicroBatch(batch=batch, samples=chosen.samples, indices=chosen.indices)

    def _read_by_workers(self, ranges: Iterator[SampleRange]) -> Iterator[tuple[SampleRange, Any]]:
        """Read in processes that live for all epochs."""
        if self._dataloader is None:
            self._dataloader = DataLoader(
                self._micro_batches,  # type: ignore[arg-type]  # it has __getitems__
                batch_sampler=self._sampler,  # type: ignore[arg-type]
                collate_fn=_collated,
                num_workers=self.workers,
                persistent_workers=True,
                pin_memory=self._pins_memory,
                worker_init_fn=IgnoreSignalsInWorkers(),
                # Without a generator, it would draw from the process's random state at every epoch.
                generator=torch.Generator().manual_seed(self._seed),
            )
        self._sampler.ranges = ranges
        for batch in self._dataloader:
            yield batch
            if self._sampler.ranges is not ranges:
                raise RuntimeError("two epochs of one loader were read at the same time")

    def _ranges(self, epoch: int, start: int) -> Iterator[SampleRange]:
        """Yield the samples of each of this rank's micro-batches."""
        order = sample_order(self._size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        whole = self.portions.global_batch_size
        for begin in range(start, self._end, whole):
            step = order[begin : min(begin + whole, self._end)]
            for part in self._slices_of(len(step)):
                indices = step[part].tolist()
                # An idle rank computes any sample, with weight 0.
                yield SampleRange(epoch, indices or step[:1].tolist(), len(indices))

    def _slices_of(self, samples: int) -> list[slice]:
        """Return this rank's micro-batches in a step of this size."""
        if samples not in self._slices:
            self._slices[samples] = self.portions.slices(samples, self._world.global_rank)
        return self._slices[samples]

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step, independent of the number of ranks."""
        epoch, sample = self._position
        return {"epoch": epoch, "sample": sample, **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the last yielded step, even with other numbers of ranks or batch sizes."""
        saved = {name: state.get(name) for name in self._identity}
        if saved != self._identity:
            raise Impossible(
                f"the position was saved with {saved}; this loader has {self._identity}",
                why="the order of samples would change: some would be read twice, and others never",
                fix="restore with the same dataset, seed and shuffle, or restart the epoch",
            )
        self._position = self._resume = (int(state["epoch"]), int(state["sample"]))

    def close(self) -> None:
        """Stop the workers; they start again with the next epoch."""
        # torch stops them only when the last reference is gone, and a traceback may hold one.
        if self._dataloader is not None:
            stop_workers(self._dataloader)
        self._dataloader = None


class Ranges:
    """The ``batch_sampler`` of the workers' DataLoader: what they read in the current epoch."""

    def __init__(self) -> None:
        self.ranges: Iterator[SampleRange] = iter(())

    def __iter__(self) -> Iterator[SampleRange]:
        return self.ranges


def _collated(batch: Any) -> Any:
    """Return a batch unchanged: it was collated where it was read."""
    return batch


def _tensors(dataset: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a plain TensorDataset, whose rows can be indexed at once."""
    if type(dataset) is not TensorDataset:
        return None
    for tensor in dataset.tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
    return dataset.tensors


def _size_of(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise Impossible(
            f"BatchLoader cannot read {type(dataset).__name__}",
            why="it needs a map-style dataset: len(dataset) and dataset[index]",
            fix="use a map-style dataset, or read this one with StreamLoader",
        )
    size = len(dataset)
    if not size:
        raise Impossible("the dataset is empty", fix="check the source of its samples")
    return size
