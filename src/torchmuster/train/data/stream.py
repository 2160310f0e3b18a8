"""Steps from a stream: samples without an index, each once per epoch, on any number of ranks."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import default_collate

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.batch_split import BatchSplit, split_batch
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.data.streams.reading import (
    PREFETCH,
    Begin,
    Blocks,
    Cursor,
    Source,
    read_rounds,
    read_rounds_ahead,
    round_order,
    rounds,
    shard_owners,
)
from torchmuster.train.world import World, all_gather_object


@dataclass(frozen=True, kw_only=True)
class _Position:
    """A position between two steps: ``taken`` samples of a lap; its blocks begin at ``cursors``."""

    epoch: int
    step: int = 0
    lap: int = 0
    taken: int = 0
    cursors: Sequence[Cursor | None] = ()  # by lane; empty at the beginning of an epoch


@dataclass(kw_only=True)
class _Round:
    """The current lap: the order of all lanes, and this rank's samples by lane."""

    number: int
    order: list[int] = field(default_factory=list)
    cursors: Sequence[Cursor | None] = ()
    samples: dict[int, Iterator[Any]] = field(default_factory=dict)
    taken: int = 0
    is_last: bool = False


class StreamLoader:
    """Yields each rank's part of each global batch of a source.

    A source has lanes, and each rank owns some of them: an equal number, or in proportion to the
    micro-batch sizes. The samples of a step depend on the source, the seed, the epoch, ``block``
    and the global batch size; never on the number of ranks, workers or micro-batches. Ranks whose
    lanes are exhausted compute a sample with weight 0 until all lanes are.

    ``block`` samples of each lane are read at a time, which is also the shuffle buffer: a rank
    holds ``block`` samples for each of its lanes. ``workers`` are processes that read ahead.
    ``prefetch`` is the number of rounds that each of them reads ahead. The ranks exchange once per
    round how many samples their lanes have.
    """

    def __init__(
        self,
        source: Source,
        world: World,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        accumulation: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        block: int = 64,
        collate: Callable[[list[Any]], Any] = default_collate,
        workers: int = 0,
        prefetch: int = PREFETCH,
    ) -> None:
        self.portions: BatchSplit = split_batch(
            world.world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
        )
        self.workers = workers
        self._prefetch = prefetch
        self._source = source
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._block = block
        self._collate = collate
        self._lanes = source.lanes()
        self._owners = shard_owners(self._lanes, world.world_size)
        self._own = [lane for lane, rank in enumerate(self._owners) if rank == world.global_rank]
        self._elsewhere = world.device.type != "cpu"
        self._spare: list[Any] = []  # for idle micro-batches
        self._position = _Position(epoch=0)
        self._resume: _Position | None = None
        if self._lanes < world.world_size and world.is_first:
            warnings.warn(
                f"the data has {self._lanes} lanes for {world.world_size} ranks: "
                f"{world.world_size - self._lanes} ranks stay idle. "
                "Give the source more lanes (and keep their number for the whole run)",
                stacklevel=2,
            )

    def steps_in_epoch(self) -> int | None:
        """Return None: the number of steps is known only at the end of the stream."""
        return None

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch, from step ``begin`` on; earlier steps are read and skipped.

        After :meth:`restore`, the restored epoch continues from its position if no ``begin`` is
        given.
        """
        start = _Position(epoch=epoch)
        resume, self._resume = self._resume, None
        if resume is not None and resume.epoch == epoch and (not begin or resume.step <= begin):
            start = resume
        self._position = start
        return self._steps(start, begin)

    def _steps(self, start: _Position, begin: int) -> Iterator[Step]:
        whole = self.portions.global_batch_size
        laps = self._laps(start)
        lap = next(laps)
        number = start.step
        while True:
            own = [0] * self._world.world_size
            mine: list[Any] = []
            samples = 0
            while samples < whole:
                if lap.taken == len(lap.order):
                    if lap.is_last:
                        break
                    lap = next(laps)
                mine += self._take(lap, whole - samples, own)
                samples = sum(own)
            if not samples:
                break
            number += 1
            self._position = _Position(
                epoch=start.epoch,
                step=number,
                lap=lap.number,
                taken=lap.taken,
                cursors=lap.cursors,
            )
            if number > begin:
                yield self._step(start.epoch, number - 1, own, mine)
        self._position = _Position(epoch=start.epoch + 1)

    def _take(self, lap: _Round, count: int, own: list[int]) -> list[Any]:
        """Take the next samples of a lap; return this rank's, and count those of all ranks."""
        lanes = lap.order[lap.taken : lap.taken + count]
        lap.taken += len(lanes)
        whose, blocks = self._owners, lap.samples
        for lane in lanes:
            own[whose[lane]] += 1
        return [next(blocks[lane]) for lane in lanes if lane in blocks]

    def _step(self, epoch: int, number: int, own: list[int], mine: list[Any]) -> Step:
        size = self.portions.micro_batch_size
        needed = rounds(own, size)
        return Step(
            epoch=epoch,
            number=number,
            rounds=needed,
            samples=sum(own),
            nominal_samples=self.portions.global_batch_size,
            micro_batches=self._micro_batches(mine, size, needed, epoch),
        )

    def _micro_batches(
        self, mine: list[Any], size: int, needed: int, epoch: int
    ) -> Iterator[MicroBatch]:
        for place in range(0, needed * size, size):
            samples = mine[place : place + size]
            if samples:
                self._spare = samples[:1]
            elif not self._spare:
                self._spare = self._any_sample(epoch)
            batch = self._collate(samples or self._spare)
            if self._elsewhere:
                device = self._world.device
                batch = move_to_device(batch, device, pin=device.type == "cuda")
            yield MicroBatch(batch=batch, samples=len(samples))

    def _any_sample(self, epoch: int) -> list[Any]:
        """Read a sample of any lane, for a rank that never had one."""
        for lane in range(self._lanes):
            opened = self._source.open([lane], epoch=epoch, cursors={})[lane]
            try:
                if samples := opened.read(1):
                    return samples
            finally:
                opened.close()
        raise Impossible(
            f"rank {self._world.global_rank} has no sample at all",
            why="an idle rank needs a sample to take part in the other ranks' steps",
            fix="provide at least one sample for each rank, or use fewer ranks",
        )

    def _laps(self, start: _Position) -> Iterator[_Round]:
        """Yield laps, the first one from the restored position on."""
        cursors = start.cursors or [None] * self._lanes
        begin = Begin(
            lanes=self._own,
            epoch=start.epoch,
            cursors={lane: cursors[lane] for lane in self._own},
            lap=start.lap,
            block=self._block,
            seed=self._seed,
            shuffle=self._shuffle,
        )
        laps = self._blocks(begin)
        number = start.lap
        while True:
            lap = self._agreed(laps, number)
            if number == start.lap:
                self._take(lap, start.taken, [0] * self._world.world_size)
            yield lap
            number += 1

    def _blocks(self, begin: Begin) -> Iterator[Blocks]:
        if not self.workers:
            return read_rounds(self._source, begin)
        return read_rounds_ahead(
            self._source,
            begin,
            workers=self.workers,
            world=self._world,
            prefetch=self._prefetch,
        )

    def _agreed(self, laps: Iterator[Blocks], number: int) -> _Round:
        """Read this rank's blocks and exchange their lengths; an error raises on all ranks."""
        blocks: Blocks = {}
        error: MusterError | None = None
        try:
            blocks = next(laps)
        except MusterError as raised:
            error = raised
        told = all_gather_object(
            {
                "error": error and error.what,
                "data": self._source.identity(),
                "lanes": [[lane, len(one.samples), one.cursor] for lane, one in blocks.items()],
            },
            self._world,
        )
        _raise_if_wrong(error, told)
        lanes = sorted(one for rank in told for one in rank["lanes"])
        counts = [count for _, count, _ in lanes]
        return _Round(
            number=number,
            order=round_order(counts),
            cursors=[cursor for _, _, cursor in lanes],
            samples={lane: iter(one.samples) for lane, one in blocks.items()},
            is_last=max(counts) < self._block,
        )

    def state(self) -> dict[str, Any]:
        """Return the position after the last yielded step, independent of the number of ranks."""
        at = self._position
        return {
            "epoch": at.epoch,
            "step": at.step,
            "lap": at.lap,
            "taken": at.taken,
            "cursors": list(at.cursors),
            **self._identity(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the last yielded step, even with other numbers of ranks or batch sizes."""
        identity = self._identity()
        saved = {name: state.get(name) for name in identity}
        if saved != identity:
            wrong = [name for name in identity if saved[name] != identity[name]]
            raise Impossible(
                "the position was saved for another stream: "
                + "; ".join(f"{name} was {saved[name]}, but is {identity[name]}" for name in wrong),
                why="the order of samples would change: some would be read twice, and others never",
                fix="restore with the same data, seed, shuffle and block, or restart the epoch",
            )
        self._position = self._resume = _Position(
            epoch=int(state["epoch"]),
            step=int(state["step"]),
            lap=int(state["lap"]),
            taken=int(state["taken"]),
            cursors=list(state["cursors"]),
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._source.identity(),
            "lanes": self._lanes,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "block": self._block,
        }


def _raise_if_wrong(own: MusterError | None, told: list[dict[str, Any]]) -> None:
    """Raise the same error on all ranks, so that none waits for a rank that has failed."""
    if own is not None:
        raise own
    for rank, one in enumerate(told):
        if one["error"]:
            raise MusterError(
                f"rank {rank} could not read its data: {one['error']}",
                fix="see the error of that rank",
            )
    for rank, one in enumerate(told):
        if one["data"] != told[0]["data"]:
            raise MusterError(
                f"rank {rank} reads {one['data']}, but rank 0 reads {told[0]['data']}",
                why="all ranks must read the same files; otherwise samples are used several times or "
                "never",
                fix="give all ranks the same files; restart if files were added meanwhile",
            )
