"""Read (with validation) and write safetensors headers; the tensors' bytes are not read.

The format is 8 bytes for the length of the header, the header as JSON, then the tensors one after
another. (The safetensors package maps whole files and needs numpy or torch; here files may be in
object storage.)
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from torchmuster.checkpoints.store import decode_strictly, is_file_name
from torchmuster.redaction import harmless

INDEX = "index.json"
# A thousand ranks with a thousand sharded tensors each need a third of it.
MOST_BYTES = 2**30

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


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor; ``dtype`` is its safetensors name, such as F32, BF16 or I64."""

    dtype: str
    shape: Extents
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tensors by name. ``tied`` maps other names of a tensor to its name in ``tensors``."""

    tensors: Mapping[_Name, StoredTensor]
    tied: Mapping[_Name, _Name] = {}

    def to_json(self) -> bytes:
        """Return the index as file content."""
        return msgspec.json.encode(self) + b"\n"

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
    """Return the header for tensors (key, dtype, shape) in this order."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for key, dtype, shape in tensors:
        end = place + math.prod(shape) * ELEMENT_BYTES[dtype]
        content[key] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
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
