"""Read a rank's lanes lap by lap, in this process or prefetched by worker processes."""

import io
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchmuster.errors import MusterError
from torchmuster.train.data.worker_processes import (
    IgnoreSignalsInWorkers,
    SharedMemory,
    free_shared_memory,
    random_numbers_kept,
    seed_cpu,
)
from torchmuster.train.seeds import derive_seed
from torchmuster.train.torch_private import forget_worker_info
from torchmuster.train.world import World

T = TypeVar("T")


def shard_owners(lanes: int, ranks: int) -> list[int]:
    """Return the rank that owns each lane: round-robin."""
    return [lane % ranks for lane in range(lanes)]


def round_order(counts: Sequence[int]) -> list[int]:
    """Return the lane of each position of a lap, given how many samples each lane has in it."""
    return [
        lane
        for turn in range(max(counts, default=0))
        for lane, count in enumerate(counts)
        if count > turn
    ]


def shuffled(block: list[T], seed: int, epoch: int, lane: int, lap: int) -> list[T]:
    """Return a lane's block of a lap in its own order."""
    mixed = list(block)
    random.Random(derive_seed(seed, "block", epoch, lane, lap)).shuffle(mixed)
    return mixed


def rounds(own_samples: Sequence[int], micro_batch_size: int) -> int:
    """Return the number of micro-batches of each rank for a step: the maximum over the ranks."""
    return -(-max(own_samples) // micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """An object with its tensors separated. Only sent between processes of one rank."""

    words: bytes
    shapes: list[tuple[torch.dtype, torch.Size]]
    flat: dict[torch.dtype, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        """The shared memory that its tensors take."""
        return sum(tensor.nbytes for tensor in self.flat.values())


class _Packer(pickle.Pickler):
    def __init__(self, words: io.BytesIO) -> None:
        super().__init__(words, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided:
            return None
        self.tensors.append(thing.detach().cpu())
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, words: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(words)
        self._tensors = tensors

    def persistent_load(self, place: int) -> torch.Tensor:
        return self._tensors[place]


def pack_batch(thing: Any) -> PackedBatch:
    """Pack an object."""
    words = io.BytesIO()
    packer = _Packer(words)
    packer.dump(thing)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in packer.tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return PackedBatch(
        words=words.getvalue(),
        shapes=[(tensor.dtype, tensor.shape) for tensor in packer.tensors],
        flat={dtype: torch.cat(some) for dtype, some in by_dtype.items()},
    )


def unpack_batch(parcel: PackedBatch) -> Any:
    """Unpack an object."""
    begins = dict.fromkeys(parcel.flat, 0)
    tensors = []
    for dtype, shape in parcel.shapes:
        begin = begins[dtype]
        begins[dtype] = begin + shape.numel()
        tensors.append(parcel.flat[dtype][begin : begins[dtype]].view(shape))
    return _Unpacker(io.BytesIO(parcel.words), tensors).load()


Cursor = Any  # plain JSON types; their meaning is up to the source


class ShardReader(Protocol):
    """An open lane."""

    def read(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, fewer only at the end of the lane."""
        ...

    def cursor(self) -> Cursor:
        """Return the position of the next sample, from which the lane can be reopened."""
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


class Source(Protocol):
    """Samples in lanes, the same ones in the same order for the same seed and epoch."""

    def lanes(self) -> int:
        """Return the number of lanes, which does not depend on the number of ranks."""
        ...

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> Mapping[int, ShardReader]:
        """Open these lanes: from their beginning, or at a cursor."""
        ...

    def identity(self) -> str:
        """Return a short text that differs for other data, so that positions are not mixed up."""
        ...


PREFETCH = 2  # laps that each process prefetches


@dataclass(frozen=True, kw_only=True)
class Block:
    """The samples of a lane in a lap, and its cursor when the lap began."""

    samples: list[Any]
    cursor: Cursor


Blocks = dict[int, Block]  # by lane


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Where to start reading, and how."""

    lanes: Sequence[int]
    epoch: int
    cursors: Mapping[int, Cursor | None]
    lap: int
    block: int  # samples of a lane in a lap
    seed: int
    shuffle: bool


def read_rounds(source: Source, begin: Begin) -> Iterator[Blocks]:
    """Yield the blocks of each lap; after the last ones, empty blocks forever.

    A source's random numbers depend on the seed, the epoch, the lane and the lap, and do not change
    the random state of training: a run that resumes in the middle of a lap reads that lap again.
    """
    with random_numbers_kept():
        opened = source.open(begin.lanes, epoch=begin.epoch, cursors=begin.cursors)
    lap = begin.lap
    try:
        while True:
            cursors = {lane: reading.cursor() for lane, reading in opened.items()}
            blocks = {}
            with random_numbers_kept():
                for lane, reading in opened.items():
                    seed_cpu(derive_seed(begin.seed, "lap", begin.epoch, lane, lap))
                    samples = reading.read(begin.block)
                    if begin.shuffle:
                        samples = shuffled(samples, begin.seed, begin.epoch, lane, lap)
                    blocks[lane] = Block(samples=samples, cursor=cursors[lane])
            yield blocks
            lap += 1
    finally:
        for reading in opened.values():
            reading.close()


class _Reading(IterableDataset[PackedBatch]):
    """The work of a reading process: its share of the lanes, one packed batch per lap."""

    def __init__(self, source: Source, begin: Begin, room: SharedMemory) -> None:
        self._source = source
        self._begin = begin
        self._room = room

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        assert worker is not None
        # A dataset that splits itself among loader workers would lose samples: each process already
        # has its own lanes.
        forget_worker_info()
        mine = self._begin.lanes[worker.id :: worker.num_workers]
        try:
            for blocks in read_rounds(self._source, replace(self._begin, lanes=mine)):
                parcel = pack_batch(blocks)
                if refusal := self._room.refusal(parcel.size_bytes):
                    raise refusal
                yield parcel
        except MusterError as error:  # torch would flatten it into one long text
            yield pack_batch(error)


def read_rounds_ahead(
    source: Source, begin: Begin, *, workers: int, world: World, prefetch: int = PREFETCH
) -> Iterator[Blocks]:
    """Yield the same as :func:`read_laps`; other processes prefetch up to ``prefetch`` laps."""
    workers = min(workers, len(begin.lanes))
    if not workers:
        yield from read_rounds(source, begin)
    room = SharedMemory(
        free_bytes=free_shared_memory(),
        workers=workers,
        batches=workers * prefetch,
        ranks=world.local_world_size,
    )
    loader = DataLoader(
        _Reading(source, begin, room),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch,
        worker_init_fn=IgnoreSignalsInWorkers(),
        # Without a generator, DataLoader draws from the process's random state at every epoch.
        generator=torch.Generator().manual_seed(
            derive_seed(begin.seed, "loader", world.global_rank)
        ),
    )
    parcels = iter(loader)  # round-robin over the processes, regardless of speed
    try:
        while True:
            blocks: Blocks = {}
            for _ in range(workers):
                part = unpack_batch(next(parcels))
                if isinstance(part, MusterError):
                    raise part
                blocks.update(part)
            yield blocks
    finally:
        del parcels  # stops the processes, even while an error still holds this frame
