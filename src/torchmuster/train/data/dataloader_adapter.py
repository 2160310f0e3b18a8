"""Steps from an existing DataLoader: its batches unchanged, counts compared over the ranks."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from torchmuster.errors import Impossible
from torchmuster.train import seeds
from torchmuster.train.data.pytree import move_to_device, tensors_in
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.data.worker_processes import IgnoreSignalsInWorkers
from torchmuster.train.world import World, all_gather_object, sum_over_ranks


def refuse_uneven_ranks(counts: list[int], what: str = "batches") -> None:
    """Raise an error that names a rank with the most and one with the fewest, unless all are the same."""
    most, fewest = max(counts), min(counts)
    if most == fewest:
        return
    raise Impossible(
        f"the ranks have different numbers of {what}: rank {counts.index(most)} has {most}, rank "
        f"{counts.index(fewest)} has {fewest}",
        why=f"all ranks must take part in each: after {fewest} {what}, ranks with more would wait forever",
        fix="give all ranks the same number (DistributedSampler with drop_last, or equal shards), or use "
        "BatchLoader, which gives a rank without samples an idle batch",
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The sizes that a DataLoader reports before an epoch is read; None if unknown."""

    batches: int | None
    batch_size: int | None = None
    samples: int | None = None

    def size_of(self, batch: int) -> int | None:
        """Return how many samples a batch has; the last one may be smaller."""
        if self.batch_size is None or self.samples is None:
            return None
        return min(self.batch_size, self.samples - batch * self.batch_size)


class DataLoaderAdapter:
    """Adapts any DataLoader, or any collection of batches, to the ``Loader`` protocol.

    The number of batches is compared over the ranks when an epoch begins: if it differs, all ranks
    raise the same error. A DataLoader of unknown length (a stream) is read until all ranks' batches
    are used: ranks that finish earlier repeat their last batch with weight 0. It calls
    ``set_epoch`` on the sampler.

    A position is restored by reading up to it, with the random states from the start of the epoch;
    it is exact only if the sampler then repeats its order.
    """

    def __init__(self, dataloader: Iterable[Any], world: World, *, accumulation: int = 1) -> None:
        self._dataloader = dataloader
        self._world = world
        self._accumulation = accumulation
        if isinstance(dataloader, DataLoader):
            _keep_reading_until_saved(dataloader)
        self._plan = _plan(dataloader)
        self._position = (0, 0)  # epoch, and how many of its steps were yielded
        self._resume: tuple[int, int] | None = None
        # An epoch, and this rank's random states before its order was drawn, as JSON types.
        self.epoch_began: dict[str, Any] | None = None
        sampler = _sampler_without_ranks(dataloader)
        if sampler and world.world_size > 1 and world.is_first:
            warnings.warn(
                f"every rank reads the same samples: the DataLoader's {sampler} does not split by "
                "rank; use a DistributedSampler or BatchLoader, unless each rank has its own "
                "dataset",
                stacklevel=2,
            )

    def steps_in_epoch(self) -> int | None:
        """Return how many steps an epoch has; None for a stream."""
        if self._plan.batches is None:
            return None
        return -(-self._plan.batches // self._accumulation)

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Compare the ranks' numbers of batches, then yield the steps, from step ``begin`` on."""
        if self._resume is not None and not begin and self._resume[0] == epoch:
            begin = self._resume[1]
        self._resume = None
        self._position = (epoch, begin)
        _tell_epoch(self._dataloader, epoch)
        plans = [_Plan(**told) for told in all_gather_object(vars(self._plan), self._world)]
        if any(plan.batches is None for plan in plans):
            return self._steps_together(epoch, begin)
        refuse_uneven_ranks([plan.batches or 0 for plan in plans])
        return self._steps(epoch, begin, plans)

    def _steps(self, epoch: int, begin: int, plans: list[_Plan]) -> Iterator[Step]:
        """Yield the steps of all ranks; the sample count is known if all ranks know theirs."""
        batches = self._batches(epoch, begin)
        nominal = self._accumulation * sum(plan.batch_size or 1 for plan in plans)
        for number in range(begin, self.steps_in_epoch() or 0):
            first = number * self._accumulation
            numbers = range(first, min(first + self._accumulation, self._plan.batches or 0))
            sizes = [plan.size_of(one) for one in numbers for plan in plans]
            known = [size for size in sizes if size is not None]
            its_own = self._micro_batches(batches, numbers)
            self._position = (epoch, number + 1)
            yield Step(
                epoch=epoch,
                number=number,
                rounds=len(numbers),
                samples=sum(known) if len(known) == len(sizes) else None,
                nominal_samples=nominal,
                micro_batches=its_own,
            )
            deque(its_own, maxlen=0)  # the unread rest

    def _micro_batches(self, batches: Iterator[Any], numbers: range) -> Iterator[MicroBatch]:
        for number in numbers:
            try:
                batch = next(batches)
            except StopIteration:
                raise Impossible(
                    f"the DataLoader stopped after {number} batches",
                    why=f"its length is {self._plan.batches}",
                    fix="make its length match the number of batches",
                ) from None
            size = self._plan.size_of(number)
            yield MicroBatch(
                batch=move_to_device(batch, self._world.device),
                samples=_samples_in(batch) if size is None else size,
            )

    def _steps_together(self, epoch: int, begin: int) -> Iterator[Step]:
        """Yield steps of streams: before each step the ranks exchange who still has batches."""
        batches = self._batches(epoch, begin)
        kept: Any = None
        number, nominal = begin, None
        while True:
            own = list(islice(batches, self._accumulation))
            kept = own[-1] if own else kept
            samples = [_samples_in(batch) for batch in own]
            busy = [place < len(own) for place in range(self._accumulation)]
            *ranks_busy, empty, together = sum_over_ranks(
                [*busy, kept is None, sum(samples)], self._world
            )
            rounds = sum(ranks > 0 for ranks in ranks_busy)
            if not rounds:
                return
            if empty:
                self._refuse_empty(kept is None)
            idle = rounds - len(own)
            nominal = nominal or int(together)
            self._position = (epoch, number + 1)
            yield Step(
                epoch=epoch,
                number=number,
                rounds=rounds,
                samples=int(together),
                nominal_samples=nominal,
                micro_batches=[
                    MicroBatch(batch=move_to_device(batch, self._world.device), samples=count)
                    for batch, count in zip(own + [kept] * idle, samples + [0] * idle, strict=True)
                ],
            )
            number += 1

    def _refuse_empty(self, own: bool) -> None:
        """Raise on all ranks: a rank without any batch cannot take part."""
        empty = [rank for rank, one in enumerate(all_gather_object(own, self._world)) if one]
        raise Impossible(
            f"these ranks got no batch at all, while others did: {', '.join(map(str, empty))}",
            why="all ranks must take part in each step",
            fix="give each rank at least one batch: more shards, or fewer ranks",
        )

    def _batches(self, epoch: int, begin: int) -> Iterator[Any]:
        now = seeds.save_random_states(self._world)
        if not begin:
            self.epoch_began = {"epoch": epoch, "random": now}
            return iter(self._dataloader)
        # These random numbers were drawn before; training continues with its own state.
        if self.epoch_began is not None and self.epoch_began["epoch"] == epoch:
            seeds.load_random_states(self.epoch_began["random"], self._world)
        batches = iter(self._dataloader)
        deque(islice(batches, begin * self._accumulation), maxlen=0)
        seeds.load_random_states(now, self._world)
        return batches

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step."""
        epoch, step = self._position
        return {"epoch": epoch, "step": step}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the saved steps of that epoch, which are read and skipped."""
        self._position = self._resume = (int(state["epoch"]), int(state["step"]))


def _keep_reading_until_saved(dataloader: DataLoader[Any]) -> None:
    """Keep the loader's processes running while a stopping rank still needs them."""
    if not isinstance(dataloader.worker_init_fn, IgnoreSignalsInWorkers):
        dataloader.worker_init_fn = IgnoreSignalsInWorkers(dataloader.worker_init_fn)


def _plan(dataloader: Any) -> _Plan:
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        return _Plan(batches=None)  # its length, if any, is an estimate
    if not isinstance(dataloader, Sized):
        return _Plan(batches=None)
    try:
        batches = len(dataloader)
    except TypeError:  # a sampler without a length
        return _Plan(batches=None)
    sampler = getattr(dataloader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:
        return _Plan(batches=batches)
    return _Plan(batches=batches, batch_size=sampler.batch_size, samples=len(sampler.sampler))  # type: ignore[arg-type]


def _tell_epoch(dataloader: Any, epoch: int) -> None:
    """Call ``set_epoch`` wherever it exists; without it a sampler repeats the same shuffle."""
    for holder in ("sampler", "batch_sampler", "dataset"):
        set_epoch = getattr(getattr(dataloader, holder, None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _sampler_without_ranks(dataloader: Any) -> str | None:
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
