"""Storage for torch.distributed.checkpoint (DCP), whose planner assigns data to ranks.

DCP's own writers are not suitable: the file system writers pickle, ``HuggingFaceStorageWriter``
supports only tensors, and neither hashes its files nor makes sure that they reached the disk. While
planning, ranks exchange DCP's plans as pickles; these come only from the ranks of this job, and are
never stored.
"""

import contextlib
import ctypes
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchmuster.checkpoints.manifest import (
    FileRecord,
    Manifest,
    commit_checkpoint,
    now_unix_s,
    write_file,
)
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.tensor_file import (
    INDEX,
    Chunk,
    FileEntry,
    Index,
    StoredTensor,
    file_head,
    read_file_head,
)
from torchmuster.errors import Impossible, MusterError

WORDS: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
DTYPES: Mapping[str, torch.dtype] = {word: dtype for dtype, word in WORDS.items()}

# Large enough that hashing and writing are one long call each, during which other threads run.
_PIECE_BYTES = 4 * 2**20


def refuse_unknown_dtype(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for a tensor of a dtype that safetensors does not support."""
    for name, tensor in tensors.items():
        if tensor.dtype not in WORDS or tensor.layout is not torch.strided:
            raise Impossible(
                f"{name} cannot be saved in a checkpoint: it is {tensor.dtype}, {tensor.layout}",
                why="safetensors does not support this dtype or layout",
                fix=f"convert it to {', '.join(str(one) for one in WORDS)}",
            )


def byte_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on any device."""
    host = tensor.detach().cpu().contiguous()
    yield from byte_pieces_of(host)


def byte_pieces_of(host: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous CPU tensor in pieces."""
    if not host.nbytes:
        return
    # torch exposes a buffer only through numpy, which may be missing and does not support bfloat16.
    array = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    content = memoryview(array).cast("B")
    for begin in range(0, len(content), _PIECE_BYTES):
        yield content[begin : begin + _PIECE_BYTES]


class Reader(StorageReader):
    """Reads one checkpoint, whose index is already known."""

    def __init__(self, store: Store, name: str, index: Index) -> None:
        self._store = store
        self._name = name
        self._index = index
        self._chunks: dict[MetadataIndex, tuple[Chunk, str]] = {}  # with its dtype name

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as DCP metadata."""
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
        """Do nothing: the metadata is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the data of this rank, file by file."""
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
                    f"cannot read {file} of {self._name}",
                    why=str(error),
                    fix="check the disk or the object storage, and rerun",
                ) from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: checkpoint names are chosen here."""
        return True

    @staticmethod
    def _read_file(
        stream: BinaryIO,
        size_bytes: int,
        items: list[tuple[ReadItem, Chunk, str]],
        planner: LoadPlanner,
    ) -> None:
        found = read_file_head(stream, size_bytes)
        for item, chunk, dtype in items:
            part = _part(stream, _entry(found, chunk, dtype), item)
            place = planner.resolve_tensor(item).detach()
            place.copy_(part)
            planner.commit_tensor(item, place)


def _entry(found: Mapping[str, FileEntry], chunk: Chunk, dtype: str) -> FileEntry:
    entry = found.get(chunk.key)
    if entry is None or entry.shape != chunk.shape or entry.dtype != dtype:
        raise ValueError(f"{chunk.key} does not match the index")
    return entry


def _part(stream: BinaryIO, entry: FileEntry, item: ReadItem) -> torch.Tensor:
    """Read the rows that contain the requested part of a chunk; return that part."""
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
            raise ValueError("unexpected end of file")
        room = room[count:]
    part = torch.frombuffer(content, dtype=dtype).view(shape)
    for dimension in range(1, len(shape)):
        part = part.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    return part


STATE = "state.json"
_PATIENT = 10  # of 19: training on the same cores has priority

# Takes the tensors to write, and returns their bytes.
Take = Callable[[list[torch.Tensor]], Iterable[memoryview]]


def file_of_rank(rank: int) -> str:
    """Return the name of the file with a rank's own state: its random states."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class WriteFacts:
    """The manifest's description of the training run."""

    step: int
    world_size: int
    strategy: str
    global_batch_size: int | None
    best: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The files that one rank wrote, and the chunks of tensors in them. Sent to rank 0."""

    files: Mapping[str, FileRecord]
    chunks: list[tuple[str, Chunk]]


class Writer(StorageWriter):
    """Writes one checkpoint: tensors and own state on each rank; rank 0 commits."""

    def __init__(
        self,
        store: Store,
        name: str,
        facts: WriteFacts,
        *,
        rank: int,
        own: Any,
        rest: Any,
        tied: Mapping[str, str],
        take: Take,
        rest_after: Callable[[int], None],
    ) -> None:
        self._store = store
        self._name = name
        self._facts = facts
        self._rank = rank
        self._own = own
        self._rest = rest
        self._tied = tied
        self._take = take
        self._rest_after = rest_after

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a store creates what it needs."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        with _told_simply():
            written = self._write(plan, planner)
        result = WriteResult(
            index=MetadataIndex(file_of_rank(self._rank)),
            size_in_bytes=sum(one.size_bytes for one in written.files.values()),
            storage_data=written,
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the common files, and the marker last; all ranks get the size with the metadata."""
        with _told_simply():
            files: dict[str, FileRecord] = {}
            chunks: dict[str, list[Chunk]] = {}
            for result in (one for of_rank in results for one in of_rank):
                files |= result.storage_data.files
                for name, chunk in result.storage_data.chunks:
                    chunks.setdefault(name, []).append(chunk)
            index = _index(metadata, chunks, self._tied)
            files[INDEX] = write_file(self._store, self._name, INDEX, [index.to_json()])
            files[STATE] = write_file(self._store, self._name, STATE, [_json(self._rest)])
            manifest = Manifest(
                name=self._name,
                step=self._facts.step,
                world_size=self._facts.world_size,
                strategy=self._facts.strategy,
                global_batch_size=self._facts.global_batch_size,
                made_unix_s=now_unix_s(),
                files=files,
                best=self._facts.best,
            )
            commit_checkpoint(self._store, manifest)
            metadata.storage_data = manifest.size_bytes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: checkpoint names are chosen here."""
        return True

    def _write(self, plan: SavePlan, planner: SavePlanner) -> _Written:
        # Sorted by element size, so that each tensor is aligned to it.
        items = sorted(plan.items, key=lambda one: -_storage_dtype(one).itemsize)
        tensors = [_tensor(planner.resolve_data(one)) for one in items]
        file = f"rank-{self._rank:05d}.safetensors"
        described, chunks = [], []
        for item, tensor in zip(items, tensors, strict=True):
            key, shape = _key(item), tuple(tensor.shape)
            described.append((key, WORDS[tensor.dtype], shape))
            if tensor.nbytes:
                offset = tuple(item.index.offset or ())
                chunks.append(
                    (item.index.fqn, Chunk(offset=offset, shape=shape, file=file, key=key))
                )
        content = self._take(tensors)
        _be_patient()
        own = file_of_rank(self._rank)
        records = {
            file: write_file(
                self._store,
                self._name,
                file,
                _after(file_head(described), content),
                on_bytes=self._rest_after,
            ),
            own: write_file(self._store, self._name, own, [_json(self._own)]),
        }
        return _Written(files=records, chunks=chunks)


def unstaged_bytes(tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    """Return the bytes of the tensors without a copy, while nothing changes them."""
    for tensor in tensors:
        yield from byte_pieces(tensor)


def _after(header: bytes, content: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield header
    yield from content


def _tensor(resolved: Any) -> torch.Tensor:
    assert isinstance(resolved, torch.Tensor)  # everything else is in the JSON state
    return resolved


def _storage_dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _key(item: WriteItem) -> str:
    assert item.tensor_data is not None
    if item.tensor_data.chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(str(one) for one in item.index.offset or ())}"


def _index(metadata: Metadata, chunks: Mapping[str, list[Chunk]], tied: Mapping[str, str]) -> Index:
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        tensors[name] = StoredTensor(
            dtype=WORDS[stored.properties.dtype],
            shape=tuple(stored.size),
            chunks=tuple(chunks.get(name, ())),
        )
    return Index(tensors=tensors, tied=tied)


def _json(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False).encode()


def _be_patient() -> None:
    """Lower the priority of this thread below training. Only Linux has thread priorities."""
    if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PATIENT)


@contextlib.contextmanager
def _told_simply() -> Iterator[None]:
    """Convert any error to one that can be sent to other ranks: not all can be pickled."""
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        raise MusterError(f"{type(error).__name__}: {error}") from None
