"""Checkpoints without a training: written as a training writes them, from bytes that a test gives."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from torchmuster.checkpoints.manifest import FileRecord, Manifest, commit_checkpoint, new_name
from torchmuster.checkpoints.store import Store

ELEMENT_BYTES = {"BOOL": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F64": 8}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A tensor, and how it is cut: at these places of each dimension, the pieces dealt out to ranks."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes
    cuts: tuple[tuple[int, ...], ...] = ()


class Part(NamedTuple):
    """A part of a tensor in a rank's file."""

    key: str
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    content: bytes


SHARD = "shard-{:05d}-model-00001-of-00001.safetensors"
A_WEIGHT = Whole(dtype="F32", shape=(4, 2), content=bytes(range(32)), cuts=((2,), ()))


def save(
    store: Store,
    step: int,
    tensors: Mapping[str, Whole] | None = None,
    *,
    ranks: int = 2,
    tied: Mapping[str, str] | None = None,
    best: Mapping[str, float] | None = None,
) -> Manifest:
    """Save a checkpoint and commit it."""
    written = write(store, step, tensors, ranks=ranks, tied=tied)
    return commit_checkpoint(store, msgspec.structs.replace(written, best=best))


def write(
    store: Store,
    step: int,
    tensors: Mapping[str, Whole] | None = None,
    *,
    ranks: int = 2,
    tied: Mapping[str, str] | None = None,
) -> Manifest:
    """Write all files of a checkpoint but its marker."""
    tensors = tensors or {"model.weight": A_WEIGHT}
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    deal = itertools.cycle(range(ranks))
    for key, whole in tensors.items():
        for offset, shape in boxes(whole):
            part = Part(key, whole.dtype, offset, shape, cut_out(whole, offset, shape))
            parts[next(deal)].append(part)
    state: dict[str, dict[str, object]] = {"progress": {"step": step}}
    for key in [*tensors, *(tied or {})]:
        part_of_state, _, own_name = key.partition(".")
        state.setdefault(part_of_state, {})[own_name] = {"__tensor__": key}
    return write_parts(store, step, parts, state=state, tied=tied)


def write_parts(
    store: Store,
    step: int,
    parts: Sequence[Sequence[Part]],
    *,
    state: object = None,
    tied: Mapping[str, str] | None = None,
) -> Manifest:
    """Write the parts of tensors that each rank has; return the manifest, which is not written."""
    name = new_name(step)
    files = {}
    for rank, of_rank in enumerate(parts, start=1):
        content = shard(of_rank)
        store.write(name, SHARD.format(rank), content)
        digest = hashlib.sha256(content).hexdigest()
        files[SHARD.format(rank)] = FileRecord(size_bytes=len(content), sha256=digest)
    return Manifest(
        name=name,
        step=step,
        world_size=len(parts),
        strategy="fsdp",
        global_batch_size=32,
        made_unix_s=1_769_860_800.0 + step,
        files=files,
        tied=tied or {},
        state=state,
        own=tuple({"python": [rank]} for rank in range(len(parts))),
    )


def shard(parts: Iterable[Part]) -> bytes:
    """Return a file as torch's HuggingFaceStorageWriter writes it; as it, sorted by element size."""
    in_order = sorted(parts, key=lambda part: -ELEMENT_BYTES[part.dtype])
    offsets = {part.key: {"saved_offsets": part.offset} for part in in_order}
    header: dict[str, object] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets)}}
    end = 0
    for part in in_order:
        begin, end = end, end + len(part.content)
        header[part.key] = {
            "dtype": part.dtype,
            "shape": part.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(part.content for part in in_order)


def boxes(whole: Whole) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and shape of each piece."""
    cuts = whole.cuts or ((),) * len(whole.shape)
    edges = [[0, *places, extent] for places, extent in zip(cuts, whole.shape, strict=True)]
    for box in itertools.product(*(itertools.pairwise(one) for one in edges)):
        yield tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box)


def cut_out(whole: Whole, offset: Sequence[int], shape: Sequence[int]) -> bytes:
    """Element by element, so that it shares nothing with what is tested."""
    size = ELEMENT_BYTES[whole.dtype]
    piece = bytearray()
    for place in itertools.product(*(range(one) for one in shape)):
        at = 0
        for extent, begin, step in zip(whole.shape, offset, place, strict=True):
            at = at * extent + begin + step
        piece += whole.content[at * size : (at + 1) * size]
    assert len(piece) == math.prod(shape) * size
    return bytes(piece)
