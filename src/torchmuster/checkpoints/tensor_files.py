"""Headers of safetensors files, without torch: which tensors a checkpoint's files have, and where.

A file is 8 bytes for the length of the header, the header as JSON, then the tensors one after another.
(The safetensors package maps whole files and needs numpy or torch; here files may be in object storage.)
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

from torchmuster.checkpoints.store import Store, decode_strictly
from torchmuster.redaction import harmless

# The safetensors dtypes that torch supports, with the element size in bytes.
ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# Where torch's HuggingFaceStorageWriter notes which part of a tensor a file has.
_OFFSETS = "DCP_SHARDING_INFO"
_MOST_HEAD_BYTES = 100_000_000  # the limit of the safetensors package

_Extent = Annotated[int, Meta(ge=0, le=2**53)]
_Shape = Annotated[tuple[_Extent, ...], Meta(max_length=64)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Extent, _Extent]


class _Saved(msgspec.Struct, frozen=True):
    saved_offsets: _Shape


class Chunk(NamedTuple):
    """A part of a tensor: its offset within the tensor, its shape, and where its bytes begin."""

    file: str
    begin: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor; ``dtype`` is its safetensors name, such as F32, BF16 or I64."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def read_tensors(store: Store, name: str, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Return all tensors in the files of a checkpoint; ValueError if a file is no part of one."""
    tensors: dict[str, StoredTensor] = {}
    sizes = store.sizes(name)
    for file in files:
        with store.open(name, file) as stream:
            try:
                entries = read_head(stream, sizes.get(file) or 0, file)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
        for key, (dtype, chunk) in entries.items():
            known = tensors.get(key, StoredTensor(dtype, (0,) * len(chunk.shape), ()))
            if (known.dtype, len(known.shape)) != (dtype, len(chunk.shape)):
                raise ValueError(f"{file}: {harmless(key)[:200]} differs from that in another file")
            ends = map(sum, zip(chunk.offset, chunk.shape, strict=True))
            shape = tuple(map(max, known.shape, ends))
            tensors[key] = StoredTensor(dtype, shape, (*known.chunks, chunk))
    for key, tensor in tensors.items():
        covered = sum(math.prod(chunk.shape) for chunk in tensor.chunks)
        if covered != math.prod(tensor.shape):
            raise ValueError(f"{harmless(key)[:200]} is incomplete")
    return tensors


def read_head(stream: BinaryIO, size_bytes: int, file: str = "") -> dict[str, tuple[str, Chunk]]:
    """Return dtype and place of each tensor of a file; ValueError if it is invalid or too short."""
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(_MOST_HEAD_BYTES, size_bytes - 8):
        raise ValueError("it is not a safetensors file")
    content = decode_strictly(stream.read(length), dict[str, msgspec.Raw])
    metadata = content.pop("__metadata__", msgspec.Raw(b"{}"))
    noted = decode_strictly(metadata, dict[str, str]).get(_OFFSETS, "{}")
    offsets = decode_strictly(noted.encode(), dict[str, _Saved])
    entries = {}
    for key, text in content.items():
        entry = decode_strictly(text, _Entry)
        shown = harmless(key)[:200]
        begin, end = (8 + length + place for place in entry.data_offsets)
        offset = (0,) * len(entry.shape)
        if key in offsets:
            offset = offsets[key].saved_offsets
        if entry.dtype not in ELEMENT_BYTES or len(offset) != len(entry.shape):
            raise ValueError(f"{shown} has an unknown dtype or place")
        if not begin <= end <= size_bytes:
            raise ValueError(f"{shown} is outside of the file")
        if math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype] != end - begin:
            raise ValueError(f"{shown} has a shape that does not match its size")
        entries[key] = entry.dtype, Chunk(file, begin, offset, entry.shape)
    return entries


def file_head(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return the header for tensors (name, dtype, shape) in this order, as transformers expects it."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ELEMENT_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
