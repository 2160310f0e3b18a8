"""The head of a safetensors file: read with suspicion, and written; the tensors' bytes stay where they are.

The format is 8 bytes for the length of the head, the head as JSON, then the tensors one after another.
(The safetensors package maps whole files and needs numpy or torch; here files lie in object storage too.)
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import BinaryIO

import msgspec

from torchmuster.checkpoints.index import ELEMENT_BYTES, Extents
from torchmuster.checkpoints.strict_json import decode
from torchmuster.redaction import harmless

# The same as in the safetensors package.
_MOST_HEAD_BYTES = 100_000_000


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a file; ``begin`` and ``end`` are counted from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Extents
    data_offsets: tuple[int, int]


def head(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return what stands before the tensors' bytes, for tensors (key, dtype, shape) in this order."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for key, dtype, shape in tensors:
        end = place + math.prod(shape) * ELEMENT_BYTES[dtype]
        content[key] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def read_head(stream: BinaryIO, size_bytes: int) -> dict[str, Entry]:
    """Read which tensors a file has, and where; ValueError if it is not such a file, or has bytes too few."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(_MOST_HEAD_BYTES, size_bytes - 8):
        raise ValueError("it does not begin as a safetensors file")
    try:
        content = decode(stream.read(length), dict[str, msgspec.Raw])
        content.pop("__metadata__", None)
        written = {key: decode(one, _Written) for key, one in content.items()}
    except ValueError as error:
        raise ValueError(f"its head cannot be read: {error}") from None
    return {key: _placed(key, one, 8 + length, size_bytes) for key, one in written.items()}


def _placed(key: str, written: _Written, start: int, size_bytes: int) -> Entry:
    begin, end = (start + one for one in written.data_offsets)
    element_bytes = ELEMENT_BYTES.get(written.dtype)
    if element_bytes is None:
        raise ValueError(f"{harmless(key)[:200]} is of a type that is not known here")
    if not start <= begin <= end <= size_bytes:
        raise ValueError(f"{harmless(key)[:200]} is said to lie outside of the file")
    if math.prod(written.shape) * element_bytes != end - begin:
        raise ValueError(f"{harmless(key)[:200]} has a shape that does not fit its size")
    return Entry(dtype=written.dtype, shape=written.shape, begin=begin, end=end)
