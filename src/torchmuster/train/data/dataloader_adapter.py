"""Steps from batches that each rank reads by itself: those of a DataLoader, or of a stream."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from torchmuster.errors import Impossible, MusterError
from torchmuster.train import seeds
from torchmuster.train.data.pytree import move_to_device, tensors_in
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.data.worker_processes import IgnoreSignalsInWorkers
from torchmuster.train.world import World, all_gather_object

BLOCK_STEPS = 8  # of batches of unknown number, read and counted together


class Batch(NamedTuple):
    """A batch that was read; ``position`` is the data's own position after it, if it has one."""

    content: Any
    samples: int
    position: Any = None


class Sizes(NamedTuple):
    """The sizes that a DataLoader reports before an epoch is read; None if unknown."""

    batches: int | None
    batch_size: int | None = None
    samples: int | None = None

    def size_of(self, batch: int) -> int | None:
        """Return how many samples a batch has; the last one may be smaller."""
        if self.batch_size is None or self.samples is None:
            return None
        return min(self.batch_size, self.samples - batch * self.batch_size)


def refuse_uneven_ranks(counts: list[int]) -> None:
    """Raise an error that names a rank with the most and one with the fewest, unless all are the same."""
    most, fewest = max(counts), min(counts)
    if most == fewest:
        return
    raise Impossible(
        f"the ranks have different numbers of batches: rank {counts.index(most)} has {most}, rank "
        f"{counts.index(fewest)} has {fewest}",
        why=f"all ranks must take part in each: after {fewest} batches, ranks with more would wait forever",
        fix="give all ranks the same number (DistributedSampler with drop_last, or equal shards), or use "
        "BatchLoader, which gives a rank without samples an idle batch",
    )


class DataLoaderAdapter:
    """Adapts any DataLoader, or any collection of batches, to the ``Loader`` protocol.

    The number of batches is compared over the ranks when an epoch begins: if it differs, all ranks
    raise the same error. Batches of an unknown number are read until all ranks' are used: ranks that
    finish earlier repeat their last batch with weight 0, and the ranks exchange their numbers of
    samples once in 8 steps. It calls ``set_epoch`` on the sampler.

    A position is restored on the same number of ranks: by the ``state_dict`` of a
    ``StatefulDataLoader``, else by reading up to it with the random states from the start of the
    epoch, which is exact only if the sampler then repeats its order.
    """

    def __init__(self, dataloader: Iterable[Any], world: World, *, accumulation: int = 1) -> None:
        self._dataloader: Any = dataloader
        self._world = world
        self._accumulation = accumulation
        self._nominal_samples: int | None = None
        self._sizes = _sizes_of(dataloader)
        # Epoch, how many of its steps were yielded, and the data's own position after them.
        self._position: tuple[int, int, Any] = (0, 0, None)
        self._resume: tuple[int, int, Any] | None = None
        # An epoch, and this rank's random states before its order was drawn, as JSON types.
        self.epoch_began: dict[str, Any] | None = None
        if isinstance(dataloader, DataLoader):
            prepare = dataloader.worker_init_fn
            if not isinstance(prepare, IgnoreSignalsInWorkers):
                dataloader.worker_init_fn = IgnoreSignalsInWorkers(prepare)
        sampler = _sampler_without_ranks(dataloader)
        if sampler and world.world_size > 1 and world.is_first:
            warnings.warn(
                f"every rank reads the same samples: the DataLoader's {sampler} does not split by "
                "rank; use a DistributedSampler or BatchLoader, unless each rank has its own "
                "dataset",
                stacklevel=2,
            )

    def steps_in_epoch(self) -> int | None:
        """Return how many steps an epoch has; None if that is known only at its end."""
        if self._sizes.batches is None:
            return None
        return -(-self._sizes.batches // self._accumulation)

    def epoch(self, epoch: int) -> Iterator[Step]:
        """Compare the ranks' numbers of batches, then yield the steps."""
        if self._resume is None or self._resume[0] != epoch:
            self._resume = (epoch, 0, None)
        self._position, self._resume = self._resume, None
        for holder in ("sampler", "batch_sampler", "dataset"):
            set_epoch = getattr(getattr(self._dataloader, holder, None), "set_epoch", None)
            if callable(set_epoch):  # without it a sampler repeats the same shuffle
                set_epoch(epoch)
        ranks = [Sizes(*sizes) for sizes in all_gather_object(list(self._sizes), self._world)]
        if any(sizes.batches is None for sizes in ranks):
            return self._counted_steps()
        refuse_uneven_ranks([sizes.batches or 0 for sizes in ranks])
        return self._known_steps(ranks)

    def _known_steps(self, ranks: list[Sizes]) -> Iterator[Step]:
        """Yield steps without a collective: their sample count is known if all ranks know theirs."""
        epoch, begin, _ = self._position
        batches = self._read(self._position)
        nominal = self._accumulation * sum(sizes.batch_size or 1 for sizes in ranks)
        for number in range(begin, self.steps_in_epoch() or 0):
            first = number * self._accumulation
            numbers = range(first, min(first + self._accumulation, self._sizes.batches or 0))
            sizes_of_step = [sizes.size_of(batch) for batch in numbers for sizes in ranks]
            samples = None if None in sizes_of_step else sum(filter(None, sizes_of_step))
            micro_batches = self._micro_batches(batches, numbers)
            self._position = (epoch, number + 1, None)
            yield Step(
                epoch=epoch,
                number=number,
                rounds=len(numbers),
                samples=samples,
                nominal_samples=nominal,
                micro_batches=micro_batches,
            )
            deque(micro_batches, maxlen=0)  # the unread rest

    def _micro_batches(self, batches: Iterator[Batch], numbers: range) -> Iterator[MicroBatch]:
        for number in numbers:
            batch = next(batches, None)
            if batch is None:
                raise Impossible(
                    f"the DataLoader stopped after {number} batches",
                    why=f"its length is {self._sizes.batches}",
                    fix="make its length match the number of batches",
                )
            self._position = (*self._position[:2], batch.position)
            yield self._on_device(batch, self._sizes.size_of(number) or batch.samples)

    def _counted_steps(self) -> Iterator[Step]:
        """Yield steps of batches of unknown number: the ranks exchange the samples of a block of steps."""
        epoch, number, _ = self._position
        batches = self._read(self._position)
        last: Batch | None = None
        whole = BLOCK_STEPS * self._accumulation
        length = whole
        while length == whole:
            block, counts = self._block(batches)
            if block:
                last = block[-1]
            elif last is None and any(counts):
                last = self._first_batch()
            length = max(len(of_rank) for of_rank in counts)
            for first in range(0, length, self._accumulation):
                rounds = range(first, min(first + self._accumulation, length))
                samples = sum(sum(of_rank[first : rounds.stop]) for of_rank in counts)
                self._nominal_samples = self._nominal_samples or samples
                micro_batches = []
                for batch in block[first : rounds.stop]:
                    self._position = (epoch, number, batch.position)
                    micro_batches.append(self._on_device(batch, batch.samples))
                if last is not None:  # an idle rank computes any batch, with weight 0
                    while len(micro_batches) < len(rounds):
                        micro_batches.append(self._on_device(last, 0))
                number += 1
                self._position = (epoch, number, self._position[2])
                yield Step(
                    epoch=epoch,
                    number=number - 1,
                    rounds=len(rounds),
                    samples=samples,
                    nominal_samples=self._nominal_samples,
                    micro_batches=micro_batches,
                )
        self._position = (epoch + 1, 0, None)

    def _block(self, batches: Iterator[Batch]) -> tuple[list[Batch], list[list[int]]]:
        """Read some steps; return them and all ranks' numbers of samples. Raise errors on all ranks."""
        block: list[Batch] = []
        problem = ""
        try:
            block += islice(batches, BLOCK_STEPS * self._accumulation)
        except MusterError as error:
            problem = str(error)
        reports = all_gather_object(([batch.samples for batch in block], problem), self._world)
        for rank, (_, problem) in enumerate(reports):
            if problem:
                raise MusterError(
                    f"rank {rank} could not read its data: {problem}",
                    fix="fix or remove the record",
                )
        counts = [of_rank for of_rank, _ in reports]
        if not self._position[1] and any(counts) and not all(counts):
            raise Impossible(
                f"rank {counts.index([])} has no sample at all",
                why="an idle rank needs a sample to take part in the other ranks' steps",
                fix="provide at least one sample for each rank: more shards, or fewer ranks",
            )
        return block, counts

    def _first_batch(self) -> Batch:
        """Return a batch for a rank that is idle from a restored position on."""
        before = self.epoch_began, seeds.save_random_states(self._world)
        batch = next(self._read((self._position[0], 0, None)))
        self.epoch_began, states = before
        seeds.load_random_states(states, self._world)
        return batch

    def _on_device(self, batch: Batch, samples: int) -> MicroBatch:
        device = self._world.device
        content = batch.content
        if device.type != "cpu":
            content = move_to_device(content, device, pin=device.type == "cuda")
        return MicroBatch(batch=content, samples=samples)

    def _read(self, begin: tuple[int, int, Any]) -> Iterator[Batch]:
        """Read this rank's batches, from a position on."""
        epoch, step, position = begin
        has_state = hasattr(self._dataloader, "state_dict")
        skipped = step * self._accumulation
        if position is not None:
            self._dataloader.load_state_dict(position)
            skipped = 0
        before = seeds.save_random_states(self._world)
        if not step:
            self.epoch_began = {"epoch": epoch, "random": before}
        elif self.epoch_began is not None and self.epoch_began["epoch"] == epoch:
            seeds.load_random_states(self.epoch_began["random"], self._world)
        batches = iter(self._dataloader)
        if step:
            # These random numbers were drawn before; training continues with its own state.
            deque(islice(batches, skipped), maxlen=0)
            seeds.load_random_states(before, self._world)
        for content in batches:
            state = self._dataloader.state_dict() if has_state else None
            yield Batch(content, _samples_in(content), state)

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step; all ranks call it."""
        epoch, step, position = self._position
        return {"epoch": epoch, "step": step, "ranks": all_gather_object(position, self._world)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the last yielded step, on the same number of ranks."""
        if state["step"] and len(state["ranks"]) != self._world.world_size:
            raise Impossible(
                f"the position of the data was saved by {len(state['ranks'])} ranks, and there "
                f"are {self._world.world_size} now",
                why="each rank reads its own share of a DataLoader or a stream",
                fix="resume on the same number of ranks, or use data that BatchLoader can read",
            )
        position = None
        if state["step"]:
            position = state["ranks"][self._world.global_rank]
        self._position = self._resume = (int(state["epoch"]), int(state["step"]), position)


def _sizes_of(dataloader: Any) -> Sizes:
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        return Sizes(batches=None)  # its length, if any, is an estimate
    if not isinstance(dataloader, Sized):
        return Sizes(batches=None)
    try:
        batches = len(dataloader)
    except TypeError:  # a sampler without a length
        return Sizes(batches=None)
    sampler = getattr(dataloader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:
        return Sizes(batches=batches)
    return Sizes(batches, sampler.batch_size, len(sampler.sampler))  # type: ignore[arg-type]


def _sampler_without_ranks(dataloader: Any) -> str | None:
    """Return the class of a sampler that gives every rank the same samples; None for any other."""
    sampler = getattr(dataloader, "sampler", None)
    batches = getattr(dataloader, "batch_sampler", None)
    plain = isinstance(sampler, (RandomSampler, SequentialSampler))
    # With a user's batch_sampler, DataLoader sets a SequentialSampler that is not used.
    if not plain or type(batches) not in (BatchSampler, type(None)):
        return None
    if isinstance(batches, BatchSampler) and batches.sampler is not sampler:
        return None
    return type(sampler).__name__


def _samples_in(batch: Any) -> int:
    """Return the length of the first tensor, or of the batch itself; 1 if it has no length."""
    for tensor in tensors_in(batch):
        return int(tensor.shape[0]) if tensor.dim() else 1
    return len(batch) if isinstance(batch, Sized) else 1
