"""The index of a checkpoint's tensors, and the headers of its safetensors files.

The tensors' bytes are not read. The size of an index does not depend on the number of ranks, if each tensor is divided
evenly: see :class:`Split`.

The format is 8 bytes for the length of the header, the header as JSON, then the tensors one after
another. (The safetensors package maps whole files and needs numpy or torch; here files may be in
object storage.)
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from torchmuster.checkpoints.store import (
    Store,
    decode_strictly,
    is_file_name,
    read_small,
    refuse_too_large,
)
from torchmuster.redaction import harmless

INDEX = "index.json"
# Without splits, a thousand ranks with a thousand sharded tensors each need a third of it.
_MOST_BYTES = 2**30
MOST_RANKS = 10**6
# Each rank has two files. More entries make a folder slow on shared disks.
_RANKS_PER_FOLDER = 500


def rank_file(rank: int, ending: str = ".safetensors") -> str:
    """Return the name of a rank's file; files of ranks from 500 on are in sub-folders."""
    name = f"rank-{rank:05d}{ending}"
    first = rank - rank % _RANKS_PER_FOLDER
    return f"ranks-{first:05d}/{name}" if first else name


# The safetensors dtypes that torch supports, with the element size in bytes.
ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}

_Extent = Annotated[int, Meta(ge=0, le=2**53)]
Extents = Annotated[tuple[_Extent, ...], Meta(max_length=64)]
_Name = Annotated[str, Meta(max_length=2000)]


class Chunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a tensor: its offset within the tensor, its shape, and where it is stored."""

    offset: Extents
    shape: Extents
    file: _Name
    key: _Name


def chunk_key(name: str, shape: Sequence[int], chunk: Sequence[int], offset: Sequence[int]) -> str:
    """Return the key of a chunk in its file: the tensor's name, with the offset if it is a part."""
    if tuple(chunk) == tuple(shape):
        return name
    return f"{name}@{','.join(map(str, offset))}"


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dimension that is divided into chunks of equal extent; the last one may be smaller.

    Chunk j is in the file of the rank ``stride`` * j after the first one.
    """

    dim: Annotated[int, Meta(ge=0, le=63)]
    extent: Annotated[int, Meta(ge=1, le=2**53)]
    stride: Annotated[int, Meta(ge=1, le=MOST_RANKS)]


class Split(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """An even division of a tensor among the files of ranks; without axes, one rank has all of it.

    ``key`` is the tensor's name in the files, see :func:`chunk_key`.
    """

    key: _Name
    first_rank: Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
    axes: Annotated[tuple[Axis, ...], Meta(max_length=64)] = ()


class StoredTensor(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A tensor; ``dtype`` is its safetensors name, such as F32, BF16 or I64.

    Its elements are in the chunks of ``split``, or in ``chunks`` if it is divided in another way.
    """

    dtype: str
    shape: Extents
    chunks: tuple[Chunk, ...] = ()
    split: Split | None = None

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def pieces(
        self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks that overlap a region, by default all; others are not created."""
        begin = (0,) * len(self.shape) if offset is None else offset
        region = self.shape if shape is None else shape
        if math.prod(region) == 0:
            return
        if self.split is None:
            yield from (one for one in self.chunks if _overlaps(one, begin, region))
            return
        axes = self.split.axes
        numbers = (
            range(
                begin[axis.dim] // axis.extent,
                -(-(begin[axis.dim] + region[axis.dim]) // axis.extent),  # rounded up
            )
            for axis in axes
        )
        for place in itertools.product(*numbers):
            yield self._piece(self.split, zip(axes, place, strict=True))

    def _piece(self, split: Split, place: Iterable[tuple[Axis, int]]) -> Chunk:
        offset, shape, rank = [0] * len(self.shape), list(self.shape), split.first_rank
        for axis, number in place:
            offset[axis.dim] = number * axis.extent
            shape[axis.dim] = min(axis.extent, self.shape[axis.dim] - offset[axis.dim])
            rank += axis.stride * number
        key = chunk_key(split.key, self.shape, shape, offset)
        return Chunk(offset=tuple(offset), shape=tuple(shape), file=rank_file(rank), key=key)


def _overlaps(chunk: Chunk, offset: Sequence[int], shape: Sequence[int]) -> bool:
    return all(
        begin < other + length and other < begin + extent
        for begin, extent, other, length in zip(
            chunk.offset, chunk.shape, offset, shape, strict=True
        )
    )


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tensors by name. ``tied`` maps other names of a tensor to its name in ``tensors``."""

    tensors: Mapping[_Name, StoredTensor]
    tied: Mapping[_Name, _Name] = {}

    def to_json(self) -> bytes:
        """Return the index as file content; ValueError if :meth:`from_json` would refuse it."""
        text = msgspec.json.encode(self) + b"\n"
        refuse_too_large(INDEX, len(text), most_bytes=_MOST_BYTES)
        self.from_json(text)
        return text

    @classmethod
    def read(cls, store: Store, name: str) -> "Index":
        """Read the index of a checkpoint; ValueError describes the error."""
        return cls.from_json(read_small(store, name, INDEX, most_bytes=_MOST_BYTES))

    @classmethod
    def from_json(cls, text: bytes) -> "Index":
        """Parse an index strictly; ValueError describes the error."""
        try:
            index = decode_strictly(text, cls)
        except ValueError as error:
            raise ValueError(f"cannot read {INDEX}: {error}") from None
        for name, tensor in index.tensors.items():
            problem = _problem(tensor)
            if problem:
                raise ValueError(f"{INDEX}: {harmless(name)[:200]} {problem}")
        for name, other in index.tied.items():
            if other not in index.tensors:
                raise ValueError(f"{INDEX}: {harmless(name)[:200]} is tied to a missing tensor")
        return index


def _problem(tensor: StoredTensor) -> str:
    """Return the error in a tensor's description, if any."""
    if tensor.dtype not in ELEMENT_BYTES:
        return f"has the unknown dtype {harmless(tensor.dtype)[:40]!r}"
    if tensor.split is not None:
        return _split_problem(tensor, tensor.split)
    covered = 0
    for chunk in tensor.chunks:
        if not is_file_name(chunk.file):
            return f"refers to {harmless(chunk.file)[:100]!r}, which is not a valid file name"
        places = zip(chunk.offset, chunk.shape, tensor.shape, strict=False)
        if not len(chunk.offset) == len(chunk.shape) == len(tensor.shape) or any(
            begin + extent > end for begin, extent, end in places
        ):
            return "has a piece outside of its shape"
        covered += math.prod(chunk.shape)
    if covered != math.prod(tensor.shape):
        return f"has {math.prod(tensor.shape)} elements, but its pieces have {covered}"
    return ""


def _split_problem(tensor: StoredTensor, split: Split) -> str:
    """Return the error in an even division, if any; its chunks always cover the tensor once."""
    if tensor.chunks:
        return "has both a split and a list of pieces"
    dims = [axis.dim for axis in split.axes]
    if len(set(dims)) < len(dims) or any(dim >= len(tensor.shape) for dim in dims):
        return "is split along a dimension that it does not have, or twice along the same"
    counts = [-(-tensor.shape[axis.dim] // axis.extent) for axis in split.axes]
    last = split.first_rank
    last += sum(axis.stride * (n - 1) for axis, n in zip(split.axes, counts, strict=True))
    if math.prod(counts) > MOST_RANKS or last >= MOST_RANKS:
        return f"is split among more than {MOST_RANKS} ranks"
    return ""


# The same limit as in the safetensors package.
_MOST_HEAD_BYTES = 100_000_000


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a file; ``begin`` and ``end`` are offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Extents
    data_offsets: tuple[int, int]


def file_head(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the header for tensors (key, dtype, shape) in this order; ValueError if it is too large."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for key, dtype, shape in tensors:
        end = place + math.prod(shape) * ELEMENT_BYTES[dtype]
        content[key] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    if len(text) > _MOST_HEAD_BYTES:
        raise ValueError(f"the header of its file would be larger than {_MOST_HEAD_BYTES} bytes")
    return len(text).to_bytes(8, "little") + text


def read_file_head(stream: BinaryIO, size_bytes: int) -> dict[str, FileEntry]:
    """Return the tensors of a file and their offsets; ValueError if it is invalid or too short."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(_MOST_HEAD_BYTES, size_bytes - 8):
        raise ValueError("it is not a safetensors file")
    try:
        content = decode_strictly(stream.read(length), dict[str, msgspec.Raw])
        content.pop("__metadata__", None)
        written = {key: decode_strictly(one, _Written) for key, one in content.items()}
    except ValueError as error:
        raise ValueError(f"cannot read its header: {error}") from None
    return {key: _placed(key, one, 8 + length, size_bytes) for key, one in written.items()}


def _placed(key: str, written: _Written, start: int, size_bytes: int) -> FileEntry:
    begin, end = (start + one for one in written.data_offsets)
    element_bytes = ELEMENT_BYTES.get(written.dtype)
    if element_bytes is None:
        raise ValueError(f"{harmless(key)[:200]} has an unknown dtype")
    if not start <= begin <= end <= size_bytes:
        raise ValueError(f"{harmless(key)[:200]} is outside of the file")
    if math.prod(written.shape) * element_bytes != end - begin:
        raise ValueError(f"{harmless(key)[:200]} has a shape that does not match its size")
    return FileEntry(dtype=written.dtype, shape=written.shape, begin=begin, end=end)
