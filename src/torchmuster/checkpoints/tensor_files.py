"""Headers of safetensors files, without torch: which tensors a checkpoint's files have, and where.

A file is 8 bytes for the length of the header, the header as JSON, then the tensors one after another.
(The safetensors package maps whole files and needs numpy or torch; here files may be in object storage.)
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, NamedTuple

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


class Rows(NamedTuple):
    """Rows of a tensor in a file: the first of them, their shape, and where their bytes begin."""

    file: str
    begin: int
    first: int
    dtype: str  # its safetensors name, such as F32, BF16 or I64
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class StoredTensor(NamedTuple):
    """A tensor, and the rows that each file has, in their order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Rows, ...]

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return sum(part.size_bytes for part in self.parts)


def read_tensors(store: Store, name: str, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Return all tensors in the files of a checkpoint; ValueError if a file is no part of one."""
    parts: dict[str, list[Rows]] = {}
    sizes = store.sizes(name)
    for file in files:
        try:
            head = read_head(partial(store.read, name, file), sizes.get(file) or 0, file)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        for key, rows in head.items():
            parts.setdefault(key, []).append(rows)
    return {key: _joined(key, of_tensor) for key, of_tensor in parts.items()}


def _joined(key: str, parts: Iterable[Rows]) -> StoredTensor:
    """Return the tensor that has these rows; ValueError if some are missing, or twice there."""
    in_order = sorted(parts, key=lambda part: (part.first, part.shape))
    dtype, shape = in_order[0].dtype, in_order[0].shape
    count = 0
    for part in in_order:
        if (part.dtype, part.shape[1:], part.first) != (dtype, shape[1:], count):
            raise ValueError(
                f"{harmless(key)[:200]} is incomplete, or its files do not have rows of it"
            )
        count += math.prod(part.shape[:1])
    whole = (count, *shape[1:]) if shape else ()
    return StoredTensor(dtype, whole, tuple(in_order))


def read_head(
    read: Callable[[int, int], bytes], size_bytes: int, file: str = ""
) -> dict[str, Rows]:
    """Return what a file has of each tensor; ValueError if it is invalid or too short.

    ``read`` returns the file's bytes from one offset to another.
    """
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= min(_MOST_HEAD_BYTES, size_bytes - 8):
        raise ValueError("it is not a safetensors file")
    content = decode_strictly(read(8, 8 + length), dict[str, msgspec.Raw])
    metadata = content.pop("__metadata__", msgspec.Raw(b"{}"))
    noted = decode_strictly(metadata, dict[str, str]).get(_OFFSETS, "{}")
    offsets = decode_strictly(noted.encode(), dict[str, _Saved])
    head = {}
    for key, text in content.items():
        entry = decode_strictly(text, _Entry)
        shown = harmless(key)[:200]
        begin, end = (8 + length + offset for offset in entry.data_offsets)
        first, *columns = (0,)
        if key in offsets and entry.shape:
            first, *columns = offsets[key].saved_offsets
        if entry.dtype not in ELEMENT_BYTES or any(columns):
            raise ValueError(f"{shown} has an unknown dtype, or is no row of its tensor")
        if not begin <= end <= size_bytes:
            raise ValueError(f"{shown} is outside of the file")
        head[key] = Rows(file, begin, first, entry.dtype, entry.shape)
        if head[key].size_bytes != end - begin:
            raise ValueError(f"{shown} has a shape that does not match its size")
    return head


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
