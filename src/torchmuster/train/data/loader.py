"""Steps from a map-style dataset: each sample once per epoch, on any number of ranks."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from torchmuster.errors import Impossible
from torchmuster.train.data.batch_split import BatchSplit, split_batch
from torchmuster.train.data.order import Order
from torchmuster.train.data.pytree import move_to_device, tensors_in
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.data.worker_processes import (
    IgnoreSignalsInWorkers,
    SampleRange,
    SampleReader,
    SharedMemory,
    free_shared_memory,
)
from torchmuster.train.seeds import derive_seed, seed_process
from torchmuster.train.torch_private import stop_workers
from torchmuster.train.world import World

PREFETCH = 2  # batches that each worker prefetches; torch's default


class Workers:
    """Worker processes that live for all epochs."""

    def __init__(
        self,
        reader: SampleReader,
        count: int,
        *,
        seed: int,
        local_ranks: int,
        pin_memory: bool,
        prefetch: int = PREFETCH,
    ) -> None:
        room = SharedMemory(
            free_bytes=free_shared_memory(),
            workers=count,
            batches=count * prefetch,
            ranks=local_ranks,
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
            worker_init_fn=IgnoreSignalsInWorkers(),
            # Without a generator, DataLoader draws from the process's random state at every epoch.
            generator=torch.Generator().manual_seed(seed),
        )

    def read(self, portions: Iterator[SampleRange]) -> Iterator[tuple[SampleRange, Any]]:
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
                        why="its workers read for one epoch at a time",
                        fix="finish or close one epoch before the next, or create a second loader",
                    )
        finally:
            if upcoming.portions is mine:
                upcoming.portions = iter(())

    def close(self) -> None:
        """Stop the processes, even if something still refers to an unfinished epoch."""
        # torch stops them only when the last reference is gone, and a traceback may hold one.
        stop_workers(self._batches)


class _Upcoming:
    """The batches to read next. DataLoader requests them ahead of what it returns."""

    def __init__(self) -> None:
        self.portions: Iterator[SampleRange] = iter(())
        self.asked: deque[SampleRange] = deque()

    def __iter__(self) -> Iterator[SampleRange]:
        for portion in self.portions:
            self.asked.append(portion)
            yield portion


class _Worker:
    """The dataset of a worker process: its items are micro-batches."""

    def __init__(self, reader: SampleReader, seed: int, room: SharedMemory) -> None:
        self._reader = reader
        self._seed = seed
        self._room = room
        self._largest_bytes = 0

    def __getitem__(self, portion: SampleRange) -> Any:
        """Read a batch. If shared memory is too small for it, return the error.

        If raised, torch would wrap it in another message.
        """
        # By the samples, not by the worker: a resumed run draws the same numbers.
        seed_process(derive_seed(self._seed, "batch", portion.epoch, portion.indices[0]))
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


# Computing the order costs a few hundred microseconds, however few positions are requested.
_PLACES_AT_ONCE = 16384


class BatchLoader:
    """Yields each rank's part of each global batch of a map-style dataset.

    The samples of a step depend on the seed, the epoch and the global batch size; never on the
    number of ranks, workers or micro-batches. The rest at the end of an epoch is a smaller step
    (``drop_tail`` skips it); a rank that gets none of it computes a sample with weight 0.

    ``global_batch_size`` is the number of samples of a step over all ranks. ``micro_batch_size`` is the number that a rank
    computes at once. ``accumulation`` is the number of micro-batches
    per rank and step. ``collate`` makes a batch of a list of samples (default: torch's).

    ``workers`` are processes that read ahead; their random numbers for a micro-batch depend on the seed, the
    epoch and the first sample of the micro-batch. ``prefetch`` is the number of micro-batches that each of them reads ahead.
    With ``random_per_sample``, what the dataset draws from Python, torch and numpy depends on the seed, the epoch
    and the sample alone; otherwise, with 0 workers, it draws from this process's random states.
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
        shuffle: bool = True,
        drop_tail: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        prefetch: int = PREFETCH,
        pin_memory: bool | None = None,
        random_per_sample: bool = False,
    ) -> None:
        self.portions: BatchSplit = split_batch(
            world.world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
        )
        self.workers = workers
        self._prefetch = prefetch
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._drop_tail = drop_tail
        self._size = _loader_size(dataset)
        # Of a dataset that knows more about its content than its size.
        self._data = dataset.identity() if hasattr(dataset, "identity") else None
        if not self.steps_in_epoch():
            raise Impossible(
                f"an epoch of {self._size} samples has no full step",
                why=f"a global batch has {self.portions.global_batch_size} samples, and drop_tail "
                "skips "
                "incomplete batches",
                fix="use a smaller global_batch_size, or drop_tail=False",
            )
        self._reader = SampleReader(
            dataset,
            collate=collate,
            seed=seed,
            random_per_sample=random_per_sample,
        )
        self._pin_memory = world.device.type == "cuda" if pin_memory is None else pin_memory
        self._elsewhere = world.device.type != "cpu"
        self._workers_at_work: Workers | None = None
        self._position = (0, 0)  # epoch, and how many of its samples were yielded
        self._resume: tuple[int, int] | None = None

    def steps_in_epoch(self) -> int:
        """Return how many steps an epoch has, the same on every rank."""
        whole, left = divmod(self._size, self.portions.global_batch_size)
        return whole + (left > 0 and not self._drop_tail)

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch, from step ``begin`` on; earlier steps are not read.

        After :meth:`restore`, the restored epoch continues from its position if no ``begin`` is
        given.
        """
        start = begin * self.portions.global_batch_size
        if self._resume is not None and not begin and self._resume[0] == epoch:
            start = self._resume[1]
        self._resume = None
        self._position = (epoch, start)
        return self._steps(epoch, start)

    def _steps(self, epoch: int, start: int) -> Iterator[Step]:
        whole = self.portions.global_batch_size
        end = self._end(start)
        micro_batches = self._micro_batches(epoch, start, end)
        number = start // whole
        while start < end:
            samples = min(whole, end - start)
            rounds = self.portions.rounds if samples == whole else self.portions.rounds_for(samples)
            its_own = islice(micro_batches, rounds)
            start += samples
            self._position = (epoch, start)
            yield Step(
                epoch=epoch,
                number=number,
                rounds=rounds,
                samples=samples,
                nominal_samples=whole,
                micro_batches=its_own,
            )
            deque(its_own, maxlen=0)  # the unread rest does not belong to the next step
            number += 1

    def _micro_batches(self, epoch: int, start: int, end: int) -> Iterator[MicroBatch]:
        portions = self._portions(epoch, start, end)
        device = self._world.device
        pin = self._pin_memory and not self.workers  # workers' batches are pinned already
        for portion, batch in self._read(portions):
            yield MicroBatch(
                batch=move_to_device(batch, device, pin=pin) if self._elsewhere else batch,
                samples=portion.samples,
                indices=portion.indices,
            )

    def _read(self, portions: Iterator[SampleRange]) -> Iterator[tuple[SampleRange, Any]]:
        if not self.workers:
            read = self._reader.read
            return ((portion, read(portion)) for portion in portions)
        if self._workers_at_work is None:
            self._workers_at_work = Workers(
                self._reader,
                self.workers,
                seed=self._seed,
                local_ranks=self._world.local_world_size,
                pin_memory=self._pin_memory,
                prefetch=self._prefetch,
            )
        return self._workers_at_work.read(portions)

    def _portions(self, epoch: int, start: int, end: int) -> Iterator[SampleRange]:
        """Yield this rank's micro-batches: full steps many at a time, then the tail."""
        order = Order(size=self._size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        whole = self.portions.global_batch_size
        offsets, cuts = self._own(whole)
        tail = start + (end - start) // whole * whole
        stride = whole * max(1, _PLACES_AT_ONCE // len(offsets))
        for first in range(start, tail, stride):
            steps = torch.arange(first, min(first + stride, tail), whole)
            places = (steps[:, None] + offsets).flatten()
            yield from _cut(epoch, order.samples_at(places).tolist(), cuts)
        if tail < end:
            offsets, cuts = self._own(end - tail)
            yield from _cut(epoch, order.samples_at(tail + offsets).tolist(), cuts)

    def _own(self, samples: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Return this rank's positions in a step, and how to split them: (positions, counted)."""
        offsets: list[int] = []
        cuts = []
        for part in self.portions.slices(samples, self._world.global_rank):
            counted = part.stop - part.start
            offsets += range(part.start, part.stop) if counted else [0]  # idle: any sample works
            cuts.append((max(counted, 1), counted))
        return torch.tensor(offsets), cuts

    def _end(self, start: int) -> int:
        left = self._size - start
        return start + left - (left % self.portions.global_batch_size if self._drop_tail else 0)

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step, independent of the number of ranks."""
        epoch, sample = self._position
        return {"epoch": epoch, "sample": sample, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the last yielded step, even with other numbers of ranks or batch sizes."""
        identity = self._identity()
        saved = {name: state.get(name) for name in identity}
        if saved != identity:
            raise Impossible(
                f"the position was saved with {_loader_message(saved)}; this loader has {_loader_message(identity)}",
                why="the order of samples would change: some would be read twice, and others never",
                fix="restore with the same dataset, seed and shuffle, or restart the epoch",
            )
        self._position = self._resume = (int(state["epoch"]), int(state["sample"]))

    def close(self) -> None:
        """Stop the workers; they start again with the next epoch."""
        if self._workers_at_work is not None:
            self._workers_at_work.close()
        self._workers_at_work = None

    def _identity(self) -> dict[str, Any]:
        told = {"size": self._size, "seed": self._seed, "shuffle": self._shuffle}
        return told if self._data is None else {**told, "data": self._data}


def _cut(epoch: int, indices: list[int], cuts: list[tuple[int, int]]) -> Iterator[SampleRange]:
    at = 0
    while at < len(indices):
        for length, counted in cuts:
            yield SampleRange(epoch, indices[at : at + length], counted)
            at += length


def _loader_size(dataset: Any) -> int:
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


def _loader_message(identity: dict[str, Any]) -> str:
    order = {True: "shuffled", False: "in order"}.get(identity["shuffle"], "in an unknown order")
    data = f", content {identity['data']}" if identity.get("data") else ""
    return f"{identity['size']} samples, {order}, seed {identity['seed']}{data}"
