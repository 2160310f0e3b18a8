"""Iterable datasets as a source: samples that can only be read in sequence.

An iterable has one *shard*, or several that can be read independently. Each shard is dealt out to the
same number of lanes, sample by sample. A rank reads each shard of its lanes once, and keeps
its own samples: with more ranks than shards several ranks read the same shard.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchmuster.errors import Impossible
from torchmuster.train.data.order import Order
from torchmuster.train.data.streams.reading import Cursor
from torchmuster.train.world import World

LANES = 48  # divided evenly by 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks


class Shard:
    """Reads one shard for some of its lanes; a saved state, if any, avoids skipping."""

    def __init__(self, samples: Iterable[Any], *, ways: int, begin: int) -> None:
        self._iterator = iter(samples)
        self._state: Callable[[], Any] | None = None
        if hasattr(samples, "load_state_dict"):
            self._state = samples.state_dict  # type: ignore[attr-defined]
        self._ways = ways
        self._head = begin  # index within the shard of the next sample
        self._waiting: dict[int, deque[Any]] = {}
        self._taken: dict[int, int] = {}
        # Restart points: (index within the shard, state), in ascending order.
        self._marks: list[tuple[int, Any]] = []

    def add_lane(self, way: int, taken: int) -> None:
        """Also keep the samples of another lane, from its sample number ``taken`` on."""
        self._waiting[way] = deque()
        self._taken[way] = taken

    def read(self, way: int, count: int) -> list[Any]:
        """Return the next samples of a lane; samples of other lanes are buffered."""
        self._mark()
        waiting = self._waiting[way]
        while len(waiting) < count:
            sample = next(self._iterator, self)
            if sample is self:
                break
            turn, place = divmod(self._head, self._ways)
            if place in self._waiting and turn >= self._taken[place] + len(self._waiting[place]):
                self._waiting[place].append(sample)
            self._head += 1
        samples = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        self._taken[way] += len(samples)
        return samples

    def _mark(self) -> None:
        """Add a restart point, and drop those that no lane needs any more."""
        if self._state is None or (self._marks and self._marks[-1][0] == self._head):
            return
        self._marks.append((self._head, self._state()))
        needed = min(taken * self._ways + way for way, taken in self._taken.items())
        del self._marks[: max(0, self._before(needed))]

    def _before(self, number: int) -> int:
        return bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1

    def cursor(self, way: int) -> Cursor:
        """Return the position of a lane, and the last restart point before it."""
        self._mark()
        taken = self._taken[way]
        place = self._before(taken * self._ways + way)
        head, state = self._marks[place] if place >= 0 else (0, None)
        return {"taken": taken, "shard": [head, state]}

    def close(self) -> None:
        """Stop reading."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _IterableShardReader:
    def __init__(self, shard: Shard, way: int) -> None:
        self._shard = shard
        self._way = way

    def read(self, count: int) -> list[Any]:
        return self._shard.read(self._way, count)

    def cursor(self) -> Cursor:
        return self._shard.cursor(self._way)

    def close(self) -> None:
        self._shard.close()


class Iterables:
    """A ``torch.utils.data.IterableDataset``, any other iterable, or a function of the epoch that returns one.

    It must yield the same samples in the same order each time for the same epoch (``set_epoch`` is
    called if it exists). Every rank reads everything and keeps its own samples. A position is
    restored by ``load_state_dict`` if the iterable has it, else by skipping.

    For an iterable that already splits itself among the ranks, give ``divided_among=world``: each
    rank then uses all its samples, and a position is valid for this number of ranks only.
    """

    def __init__(
        self,
        samples: Iterable[Any] | Callable[[int], Iterable[Any]],
        *,
        lanes: int = LANES,
        divided_among: World | None = None,
    ) -> None:
        if isinstance(samples, Iterator):
            raise Impossible(
                f"the data is {type(samples).__name__}, which can be read only once",
                why="each epoch and each resume reads from the beginning",
                fix="return a dataset with __iter__, or a function that takes the epoch and "
                "returns an iterator",
            )
        self._samples = samples
        self._shards = divided_among.world_size if divided_among else 1
        self._ways = 1 if divided_among else lanes

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._shards * self._ways

    def identity(self) -> str:
        """Return the type of the iterable; nothing else is known about it."""
        return f"{type(self._samples).__name__} in {self.lanes()} lanes"

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> dict[int, _IterableShardReader]:
        """Open lanes; those of one shard share its reader."""
        shards: dict[int, list[int]] = {}
        for lane in lanes:
            shards.setdefault(lane % self._shards, []).append(lane)
        opened = {}
        for shard, own in shards.items():
            known = [cursors.get(lane) or {"taken": 0, "shard": [0, None]} for lane in own]
            head, state = min((one["shard"] for one in known), key=lambda mark: int(mark[0]))
            reading = Shard(self._open(shard, epoch, state), ways=self._ways, begin=head)
            for lane, cursor in zip(own, known, strict=True):
                reading.add_lane(lane // self._shards, cursor["taken"])
                opened[lane] = _IterableShardReader(reading, lane // self._shards)
        return {lane: opened[lane] for lane in lanes}

    def _open(self, shard: int, epoch: int, state: Any) -> Iterable[Any]:
        samples = self._samples
        if callable(samples) and not isinstance(samples, Iterable):
            samples = samples(epoch)
        if (set_epoch := getattr(samples, "set_epoch", None)) is not None:
            set_epoch(epoch)
        if state is not None:
            samples.load_state_dict(state)  # type: ignore[attr-defined]
        return samples


class Indexed:
    """A map-style dataset as a source, for users of streams (packing)."""

    def __init__(
        self, dataset: Any, *, lanes: int = LANES, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._dataset = dataset
        self._lanes = lanes
        self._seed = seed
        self._shuffle = shuffle

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._lanes

    def identity(self) -> str:
        """Return the number of samples, and their order."""
        return f"{len(self._dataset)} samples of {type(self._dataset).__name__}, seed {self._seed}"

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> dict[int, "_IndexedShardReader"]:
        """Open lanes."""
        order = Order(size=len(self._dataset), seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        return {
            lane: _IndexedShardReader(
                self._dataset,
                order,
                range(lane, len(self._dataset), self._lanes),
                cursors.get(lane) or 0,
            )
            for lane in lanes
        }


class _IndexedShardReader:
    def __init__(self, dataset: Any, order: Order, places: range, begin: int) -> None:
        self._dataset = dataset
        self._order = order
        self._places = places
        self._next = begin

    def read(self, count: int) -> list[Any]:
        places = self._places[self._next : self._next + count]
        self._next += len(places)
        numbers = self._order.samples_at(torch.tensor(places, dtype=torch.int64)).tolist()
        return [self._dataset[number] for number in numbers]

    def cursor(self) -> Cursor:
        return self._next

    def close(self) -> None:
        pass


class HuggingFaceStream(Iterables):
    """A ``datasets.IterableDataset``; use ``BatchLoader`` for a map-style ``datasets.Dataset``.

    Ranks divide the dataset's own shards; if there are fewer than ``lanes``, each shard is
    dealt out sample by sample. Datasets shuffled with a buffer are restored to a position by
    reading from the beginning, all others by their own state.
    """

    def __init__(self, dataset: Any, *, lanes: int = LANES) -> None:
        super().__init__(dataset)
        self._dataset = dataset
        self._shards = dataset.num_shards
        self._ways = -(-lanes // self._shards)

    def identity(self) -> str:
        """Return the dataset's own description."""
        name = self._dataset.info.dataset_name or "dataset"
        return f"{name} {self._dataset.split}: {self._shards} shards in {self.lanes()} lanes"

    def _open(self, shard: int, epoch: int, state: Any) -> Iterable[Any]:
        part = self._dataset.shard(num_shards=self._shards, index=shard, contiguous=False)
        part.set_epoch(epoch)
        if not _state_is_exact(part):
            return _FromTheBeginning(part)
        if state is not None:
            part.load_state_dict(state)
        return part  # type: ignore[no-any-return]


def _state_is_exact(dataset: Any) -> bool:
    """Return whether the dataset's own state restores a position exactly.

    According to its documentation it does not with a shuffle buffer, whose content is lost, or with
    tables mapped in batches. Neither is visible in the state or any public attribute, so this
    inspects the dataset's internal steps; without those, the dataset is read from the beginning.
    """
    steps = getattr(dataset, "_ex_iterable", None)
    layout = getattr(dataset, "_formatting", None)
    if steps is None or getattr(layout, "is_table", False):
        return False
    waiting = [steps]
    while waiting:
        step = waiting.pop()
        if "Shuffled" in type(step).__name__:
            return False
        inner = getattr(step, "ex_iterables", None) or [getattr(step, "ex_iterable", None)]
        waiting += [one for one in inner if one is not None]
    return True


class _FromTheBeginning:
    """An iterable without its own state."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(self._samples)
