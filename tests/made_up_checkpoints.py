"""Checkpoints without a training: written as a training writes them, from bytes that a test gives."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from torchmuster.checkpoints.manifest import Manifest, commit_checkpoint, new_name, write_file
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.tensor_file import (
    ELEMENT_BYTES,
    INDEX,
    Chunk,
    Index,
    StoredTensor,
    file_head,
)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A tensor, and how it is cut: at these places of each dimension, the pieces dealt out to ranks."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes
    cuts: tuple[tuple[int, ...], ...] = ()


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
    name = new_name(step)
    of_rank: list[list[tuple[Chunk, str, bytes]]] = [[] for _ in range(ranks)]
    stored = {}
    deal = itertools.cycle(range(ranks))
    for key, whole in tensors.items():
        chunks = []
        for number, (offset, shape) in enumerate(boxes(whole)):
            rank = next(deal)
            file = f"rank-{rank:05d}.safetensors"
            chunk = Chunk(offset=offset, shape=shape, file=file, key=f"{key}@{number}")
            chunks.append(chunk)
            of_rank[rank].append((chunk, whole.dtype, cut_out(whole, offset, shape)))
        stored[key] = StoredTensor(dtype=whole.dtype, shape=whole.shape, chunks=tuple(chunks))
    contents: dict[str, Iterable[bytes]] = {
        INDEX: [Index(tensors=stored, tied=tied or {}).to_json()],
        "state.json": [json.dumps({"progress": {"step": step}}).encode()],
    }
    for rank, pieces in enumerate(of_rank):
        described = [(chunk.key, dtype, chunk.shape) for chunk, dtype, _ in pieces]
        contents[f"rank-{rank:05d}.safetensors"] = [
            file_head(described),
            *(one[2] for one in pieces),
        ]
        contents[f"rank-{rank:05d}.json"] = [json.dumps({"python": [rank]}).encode()]
    files = {file: write_file(store, name, file, pieces) for file, pieces in contents.items()}
    return Manifest(
        name=name,
        step=step,
        world_size=ranks,
        strategy="fsdp",
        global_batch_size=32,
        made_unix_s=1_769_860_800.0 + step,
        files=files,
    )


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
