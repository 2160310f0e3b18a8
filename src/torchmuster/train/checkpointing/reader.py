"""Reading through torch.distributed.checkpoint (DCP): its planner says which parts this rank needs, we read them.

Any number of ranks can read what any other number wrote. Only the rows that are needed are read, straight into the
tensors of the training. Nothing that is read is ever executed.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchmuster.checkpoints.index import Chunk, Index
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.tensor_file import Entry, read_head
from torchmuster.errors import MusterError
from torchmuster.train.checkpointing.host_bytes import DTYPES


class Reader(StorageReader):
    """Reads one checkpoint, of which the index is known already."""

    def __init__(self, store: Store, name: str, index: Index) -> None:
        self._store = store
        self._name = name
        self._index = index
        self._chunks: dict[MetadataIndex, tuple[Chunk, str]] = {}  # with the word for its type

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in DCP's words."""
        described: dict[str, Any] = {}
        stored_as = {name: name for name in self._index.tensors} | dict(self._index.tied)
        for name, first in stored_as.items():
            stored = self._index.tensors[first]
            for chunk in stored.chunks:
                self._chunks[MetadataIndex(name, chunk.offset)] = (chunk, stored.dtype)
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[stored.dtype]),
                size=torch.Size(stored.shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(one.offset), sizes=torch.Size(one.shape)
                    )
                    for one in stored.chunks
                ],
            )
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: all is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, file by file."""
        by_file: dict[str, list[tuple[ReadItem, Chunk, str]]] = {}
        for item in plan.items:
            chunk, dtype = self._chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((item, chunk, dtype))
        sizes = self._store.sizes(self._name)
        for file, items in by_file.items():
            try:
                with self._store.open(self._name, file) as stream:
                    self._read_file(stream, sizes[file], items, planner)
            except (OSError, KeyError, ValueError) as error:
                raise MusterError(
                    f"{file} of {self._name} could not be read",
                    why=str(error),
                    fix="look at the disk or the object storage, and start again",
                ) from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: names are ours."""
        return True

    @staticmethod
    def _read_file(
        stream: BinaryIO,
        size_bytes: int,
        items: list[tuple[ReadItem, Chunk, str]],
        planner: LoadPlanner,
    ) -> None:
        found = read_head(stream, size_bytes)
        for item, chunk, dtype in items:
            part = _part(stream, _entry(found, chunk, dtype), item)
            place = planner.resolve_tensor(item).detach()
            place.copy_(part)
            planner.commit_tensor(item, place)


def _entry(found: Mapping[str, Entry], chunk: Chunk, dtype: str) -> Entry:
    entry = found.get(chunk.key)
    if entry is None or entry.shape != chunk.shape or entry.dtype != dtype:
        raise ValueError(f"{chunk.key} is not in it as the index says")
    return entry


def _part(stream: BinaryIO, entry: Entry, item: ReadItem) -> torch.Tensor:
    """Read the rows that the wanted part of a chunk lies in; return that part."""
    dtype = DTYPES[entry.dtype]
    shape, first = list(entry.shape), 0
    if shape:
        first, shape[0] = item.storage_offsets[0], item.lengths[0]
    row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
    content = bytearray(math.prod(shape) * dtype.itemsize)
    stream.seek(entry.begin + first * row_bytes)
    room = memoryview(content)
    while room:
        count = stream.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it ends too early")
        room = room[count:]
    part = torch.frombuffer(content, dtype=dtype).view(shape)
    for dimension in range(1, len(shape)):
        part = part.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    return part
