"""Reading a rank's lanes lap by lap, in this process or ahead of it in others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchmuster.errors import MusterError
from torchmuster.train.data.reading import random_numbers_kept, seed_cpu
from torchmuster.train.data.shared_memory import Room, free_bytes
from torchmuster.train.data.streams.laps import shuffled
from torchmuster.train.data.streams.parcel import Parcel, pack, unpack
from torchmuster.train.data.streams.source import Cursor, Source
from torchmuster.train.data.worker_signals import HeedingOnlyTheRank
from torchmuster.train.seeds import derive
from torchmuster.train.torch_private import forget_worker_info
from torchmuster.train.world import World

PREFETCH = 2  # laps that each process has ready


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a lane gives in a lap, and where it was when the lap began."""

    samples: list[Any]
    cursor: Cursor


Blocks = dict[int, Block]  # by lane


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Where and how to begin reading."""

    lanes: Sequence[int]
    epoch: int
    cursors: Mapping[int, Cursor | None]
    lap: int
    block: int  # samples of a lane in a lap
    seed: int
    shuffle: bool


def read_laps(source: Source, begin: Begin) -> Iterator[Blocks]:
    """Yield the blocks of lap after lap; after the last ones, empty blocks for ever.

    What a source draws at random depends on the seed, the epoch, the lane and the lap, and leaves the training's
    own numbers alone: a run that goes on in the middle of a lap reads that lap again.
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
                    seed_cpu(derive(begin.seed, "lap", begin.epoch, lane, lap))
                    samples = reading.read(begin.block)
                    if begin.shuffle:
                        samples = shuffled(samples, begin.seed, begin.epoch, lane, lap)
                    blocks[lane] = Block(samples=samples, cursor=cursors[lane])
            yield blocks
            lap += 1
    finally:
        for reading in opened.values():
            reading.close()


class _Reading(IterableDataset[Parcel]):
    """What a reading process does: its share of the lanes, one parcel a lap."""

    def __init__(self, source: Source, begin: Begin, room: Room) -> None:
        self._source = source
        self._begin = begin
        self._room = room

    def __iter__(self) -> Iterator[Parcel]:
        worker = get_worker_info()
        assert worker is not None
        # A dataset that divides itself among loader workers would lose samples: here each process has
        # its lanes already.
        forget_worker_info()
        mine = self._begin.lanes[worker.id :: worker.num_workers]
        try:
            for blocks in read_laps(self._source, replace(self._begin, lanes=mine)):
                parcel = pack(blocks)
                if refusal := self._room.refusal(parcel.size_bytes):
                    raise refusal
                yield parcel
        except MusterError as error:  # torch would make one long text of it
            yield pack(error)


def read_laps_ahead(
    source: Source, begin: Begin, *, workers: int, world: World, prefetch: int = PREFETCH
) -> Iterator[Blocks]:
    """Yield the same as :func:`read_laps`, read by other processes up to ``prefetch`` laps ahead."""
    workers = min(workers, len(begin.lanes))
    if not workers:
        yield from read_laps(source, begin)
    room = Room(
        free_bytes=free_bytes(),
        workers=workers,
        batches=workers * prefetch,
        ranks=world.local_world_size,
    )
    loader = DataLoader(
        _Reading(source, begin, room),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch,
        worker_init_fn=HeedingOnlyTheRank(),
        # Without one it would take a number from the process's own, as often as an epoch begins.
        generator=torch.Generator().manual_seed(derive(begin.seed, "loader", world.global_rank)),
    )
    parcels = iter(loader)  # in turn from each process, whichever is faster
    try:
        while True:
            blocks: Blocks = {}
            for _ in range(workers):
                part = unpack(next(parcels))
                if isinstance(part, MusterError):
                    raise part
                blocks.update(part)
            yield blocks
    finally:
        del parcels  # which ends the processes, also while an error still holds this frame
