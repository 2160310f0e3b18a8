"""Write and read the files of a checkpoint, and commit it.

DCP (torch.distributed.checkpoint) determines which part of a tensor a rank has, and what to read into it. Its
writers are not suitable: the file system writers pickle, ``HuggingFaceStorageWriter`` supports only tensors, and neither
hashes its files nor makes sure that they reached the disk.
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
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from torchmuster.checkpoints.manifest import (
    FileRecord,
    Manifest,
    commit_checkpoint,
    now_unix_s,
    write_file,
)
from torchmuster.checkpoints.store import Store, read_small, refuse_too_large
from torchmuster.checkpoints.tensor_file import (
    INDEX,
    Chunk,
    FileEntry,
    Index,
    Split,
    StoredTensor,
    chunk_key,
    file_head,
    rank_file,
    read_file_head,
)
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.checkpointing.planning import SavePlan, part_of, refuse_overlap, write_items

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


# What to read from a file: DCP's item, the chunk it is in, and the dtype of the tensor.
Reads = list[tuple[ReadItem, Chunk, str]]


def read_tensors(
    store: Store,
    name: str,
    index: Index,
    files: Mapping[str, FileRecord],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Read this rank's parts of tensors from the chunks that overlap them, file by file."""
    reads = plan_reads(index, tensors)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors)
    for file, items in reads.items():
        try:
            with store.open(name, file) as stream:
                _read_file(stream, files[file].size_bytes, items, planner)
        except (OSError, KeyError, ValueError) as error:
            raise MusterError(
                f"cannot read {file} of {name}",
                why=str(error),
                fix="check the disk or the object storage, and rerun",
            ) from None


def plan_reads(index: Index, tensors: dict[str, torch.Tensor]) -> dict[str, Reads]:
    """Return what this rank reads from each file."""
    stored = {one: index.tensors[index.tied.get(one, one)] for one in tensors}
    chunks: dict[str, list[Chunk]] = {one: [] for one in tensors}
    for one, offset, shape in map(part_of, write_items(tensors)):
        chunks[one] += stored[one].pieces(offset, shape)
    reads: dict[str, Reads] = {}
    for item in create_default_local_load_plan(tensors, _metadata(stored, chunks)).items:
        source = item.storage_index
        assert source.index is not None  # the position in the list of chunks
        chunk = chunks[source.fqn][source.index]
        reads.setdefault(chunk.file, []).append((item, chunk, stored[source.fqn].dtype))
    return reads


def _metadata(stored: Mapping[str, StoredTensor], chunks: Mapping[str, list[Chunk]]) -> Metadata:
    """Return DCP's description of the chunks that this rank reads."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(one.offset), sizes=torch.Size(one.shape)
                    )
                    for one in chunks[name]
                ],
            )
            for name, tensor in stored.items()
        }
    )


def _read_file(
    stream: BinaryIO,
    size_bytes: int,
    items: Reads,
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


# Larger ones are refused, by the reader and by the writer.
_MOST_STATE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class WriteFacts:
    """The manifest's description of the training run."""

    step: int
    world_size: int
    strategy: str
    global_batch_size: int | None
    best: Mapping[str, float] | None = None


def own_file(rank: int) -> str:
    """Return the name of the file with a rank's own state: its random states."""
    return rank_file(rank, ".json")


def write_rank_files(
    store: Store,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    plan: SavePlan,
    *,
    rank: int,
    own: Any,
    take: Take,
    rest_after: Callable[[int], None],
) -> dict[str, Any]:
    """Write this rank's parts of the tensors and its own state; return what rank 0 needs to know.

    These are the size and hash of each file, and the parts of tensors that are not in ``plan.splits``; as JSON types.
    """
    file = rank_file(rank)
    described, contents, unplanned = _own_parts(tensors, plan, file)
    header = file_head(described)
    content = take(contents)
    _be_patient()
    records = {
        file: write_file(store, name, file, _after(header, content), on_bytes=rest_after),
        own_file(rank): write_json(store, name, own_file(rank), own),
    }
    return {
        "files": {one: [record.size_bytes, record.sha256] for one, record in records.items()},
        "unplanned": unplanned,
    }


def _own_parts(
    tensors: Mapping[str, torch.Tensor], plan: SavePlan, file: str
) -> tuple[list[tuple[str, str, tuple[int, ...]]], list[torch.Tensor], list[list[Any]]]:
    """Return key, dtype and shape of this rank's parts, the parts, and those that are not in ``plan.splits``."""
    described: list[tuple[str, str, tuple[int, ...]]] = []
    contents: list[torch.Tensor] = []
    unplanned: list[list[Any]] = []
    items = write_items({one: tensors[one] for one in tensors if one in plan.mine})
    # Sorted by element size, so that each tensor is aligned to it.
    for one, offset, shape in sorted(
        map(part_of, items), key=lambda part: -tensors[part[0]].element_size()
    ):
        if not math.prod(shape):
            continue
        tensor = tensors[one]
        key = chunk_key(one, tensor.shape, shape, offset)
        chunk = Chunk(offset=offset, shape=shape, file=file, key=key)
        if one in plan.splits:
            stored = _stored(tensor, split=plan.splits[one])
            if list(stored.pieces(offset, shape)) != [chunk]:
                raise MusterError(f"{one}: {chunk} is not in the plan of this save")
        else:
            unplanned.append([one, WORDS[tensor.dtype], list(tensor.shape), offset, shape])
        described.append((key, WORDS[tensor.dtype], shape))
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tuple(local.shape) != tuple(shape):
            raise Impossible(
                f"{one} cannot be saved: this rank's shard is {list(local.shape)}, but its placements say {list(shape)}",
                why="a DTensor was made from local tensors of other sizes (from_local)",
                fix="make it with torch.distributed.tensor.distribute_tensor",
            )
        contents.append(local)
    return described, contents, unplanned


def commit_save(
    store: Store,
    name: str,
    facts: WriteFacts,
    written: list[dict[str, Any]],
    *,
    tensors: Mapping[str, torch.Tensor],
    plan: SavePlan,
    tied: Mapping[str, str],
    rest: Any,
) -> int:
    """Write the common files of a checkpoint, and its marker last; return the size in bytes.

    ``written`` has the results of :func:`write_rank_files` of all ranks. A file that could not be
    read again is refused before the marker is written.
    """
    files = {
        file: FileRecord(size_bytes=size_bytes, sha256=sha256)
        for of_rank in written
        for file, (size_bytes, sha256) in of_rank["files"].items()
    }
    index = Index(tensors=_stored_tensors(written, tensors, plan), tied=tied)
    files[INDEX] = write_file(store, name, INDEX, [index.to_json()])
    files[STATE] = write_json(store, name, STATE, rest)
    manifest = Manifest(
        name=name,
        step=facts.step,
        world_size=facts.world_size,
        strategy=facts.strategy,
        global_batch_size=facts.global_batch_size,
        made_unix_s=now_unix_s(),
        files=files,
        best=facts.best,
    )
    return commit_checkpoint(store, manifest).size_bytes


def _stored_tensors(
    written: list[dict[str, Any]], tensors: Mapping[str, torch.Tensor], plan: SavePlan
) -> dict[str, StoredTensor]:
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, of_rank in enumerate(written):
        for name, dtype, shape, offset, part in of_rank["unplanned"]:
            key = chunk_key(name, shape, part, offset)
            chunk = Chunk(offset=tuple(offset), shape=tuple(part), file=rank_file(rank), key=key)
            chunks.setdefault(name, []).append(chunk)
            if kinds.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                raise Impossible(f"{name} has another shape or dtype on rank {rank}")
    stored = {
        name: _stored(tensor, split=plan.splits.get(name))
        for name, tensor in tensors.items()
        if name not in chunks
    }
    for name, of_tensor in chunks.items():
        refuse_overlap(name, [(one.offset, one.shape) for one in of_tensor])
        dtype, shape = kinds[name]
        stored[name] = StoredTensor(dtype=dtype, shape=shape, chunks=tuple(of_tensor))
    # In the order of the state; an export writes its tensors in this order.
    return {name: stored[name] for name in dict.fromkeys([*tensors, *stored])}


def _stored(tensor: torch.Tensor, *, split: Split | None) -> StoredTensor:
    return StoredTensor(dtype=WORDS[tensor.dtype], shape=tuple(tensor.shape), split=split)


def unstaged_bytes(tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    """Return the bytes of the tensors without a copy, while nothing changes them."""
    for tensor in tensors:
        yield from byte_pieces(tensor)


def _after(header: bytes, content: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield header
    yield from content


def write_json(store: Store, name: str, file: str, content: Any) -> FileRecord:
    """Write a JSON file; ValueError if :func:`read_json` would refuse it."""
    text = json.dumps(content, allow_nan=False).encode()
    refuse_too_large(file, len(text), most_bytes=_MOST_STATE_BYTES)
    return write_file(store, name, file, [text])


def read_json(store: Store, name: str, file: str) -> Any:
    """Read a JSON file; ValueError if it is invalid or too large."""
    try:
        return json.loads(read_small(store, name, file, most_bytes=_MOST_STATE_BYTES))
    except RecursionError:
        raise ValueError(f"cannot read {file}") from None


def _be_patient() -> None:
    """Lower the priority of this thread below training. Only Linux has thread priorities."""
    if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PATIENT)
