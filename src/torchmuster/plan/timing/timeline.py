"""Build a whole model's step from traces of a few blocks: its compute and collectives, in order.

Operations are linear in the micro-batch size, and the middle blocks of a model are identical. So
the step of a model of any depth equals a traced step with middle blocks inserted; work outside
blocks, such as the optimizer's on all parameters, is linear in the depth.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchmuster.plan.job import Candidate
from torchmuster.plan.memory.depth import period
from torchmuster.plan.memory.shard_degree import shard_elements
from torchmuster.plan.record import Shape, TracedCollective, TracedOperation, TraceRecord

_OF_MICRO_BATCHES = ("forward", "loss", "backward")
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class TimelineLoad(NamedTuple):
    """Operations of one kind, at some depth and micro-batch size."""

    name: str
    dtype: str
    times: float
    flops: float
    moved_bytes: float
    made_bytes: float  # of results that are new tensors


class TimelinePace(NamedTuple):
    """A section of the step: work, or a collective. A tuple, since there are many of them."""

    phase: str
    micro_batch: int
    block: int | None
    recomputed: bool
    work: tuple[TimelineLoad, ...]
    collective: TracedCollective | None


@dataclass(frozen=True, kw_only=True)
class TimelinePart:
    """One block, or the part before the first one, in one phase. Equal blocks share ``paces``."""

    phase: str
    block: int | None  # of the whole model
    last_micro_batch: bool  # also for a phase outside micro-batches
    times: int  # how often in a step
    paces: tuple[TimelinePace, ...]


def whole_step(records: Sequence[TraceRecord], candidate: Candidate) -> list[TimelinePart]:
    """Return a step's parts in order; all but the last micro-batch appear once, with a count."""
    shards = min(record.request.candidate.layout.shards for record in records)
    chosen = [one for one in records if one.request.candidate.layout.shards == shards]
    depths = sorted({record.blocks_traced for record in chosen})
    record = next(one for one in chosen if one.blocks_traced == depths[-1])
    step = _of_size(chosen, depths[-1], candidate.micro_batch_size)
    if depths[0] != depths[-1]:
        shallow = _of_size(chosen, depths[0], candidate.micro_batch_size)
        at = (record.blocks - depths[0]) / (depths[-1] - depths[0])
        step = _at_depth(shallow, step, at)
    if shards != candidate.layout.shards:
        step = _sharded(step, record, shards, candidate.layout.shards)
    return list(_timeline_parts(step, record, candidate))


class _Merged(NamedTuple):
    """Sections of a record between two collectives or borders, merged by name and dtype."""

    phase: str
    micro_batch: int
    block: int | None
    recomputed: bool
    loads: dict[tuple[str, str], TimelineLoad]
    collective: TracedCollective | None


class _Same:
    """A record compared by identity, which is faster than by its contents."""

    def __init__(self, record: TraceRecord) -> None:
        self.record = record

    def __hash__(self) -> int:
        return id(self.record)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.record is self.record


@functools.lru_cache(maxsize=256)
def _merged(same: _Same) -> list[_Merged]:
    """Return a record's sections, with recomputed work merged.

    Selective recomputing alternates between both, and how often depends on the micro-batch size.
    """
    found: list[_Merged] = []
    border = 0  # start of the sections that can still be merged
    for one in same.record.timeline:
        place = one.phase, one.micro_batch, one.block
        if one.collective is not None:
            found.append(_Merged(*place, one.recomputed, {}, one.collective))
            border = len(found)
            continue
        if len(found) > border and found[-1][:3] != place:
            border = len(found)
        known = next((two for two in found[border:] if two.recomputed == one.recomputed), None)
        if known is None:
            known = _Merged(*place, one.recomputed, {}, None)
            found.append(known)
        _add(known.loads, one.operations)
    return found


_NOTHING = TimelineLoad("", "", 0.0, 0.0, 0.0, 0.0)


def _add(loads: dict[tuple[str, str], TimelineLoad], operations: Sequence[TracedOperation]) -> None:
    for one in operations:
        key = one.name, one.dtype
        _, _, count, flops, moved, made = loads.get(key, _NOTHING)
        loads[key] = TimelineLoad(
            *key,
            count + one.count,
            flops + one.flops,
            moved + one.moved_bytes,
            made + one.made_bytes,
        )


def _of_size(records: Sequence[TraceRecord], depth: int, size: int) -> list[TimelinePace]:
    """Return the sections of one depth with micro-batches of this size."""
    by_size = {
        one.request.candidate.micro_batch_size: one for one in records if one.blocks_traced == depth
    }
    sizes = sorted(by_size)
    low, high = _merged(_Same(by_size[sizes[0]])), _merged(_Same(by_size[sizes[-1]]))
    if len(sizes) > 1 and [one[:4] for one in low] == [one[:4] for one in high]:
        at = (size - sizes[0]) / (sizes[-1] - sizes[0])
        return [_pace(one.loads, two, at) for one, two in zip(low, high, strict=True)]
    # All work except the optimizer's is assumed to scale with the samples.
    at = size / sizes[-1]
    return [_pace({} if one.phase in _OF_MICRO_BATCHES else one.loads, one, at) for one in high]


def _pace(low: dict[tuple[str, str], TimelineLoad], high: _Merged, at: float) -> TimelinePace:
    """Return the section on the straight line through two of them: 0 is the first, 1 the second."""
    work = []
    for key, two in high.loads.items():
        one = low.get(key, _NOTHING)
        work.append(_between(one, two, at)._replace(times=two.times))
    return TimelinePace(*high[:4], tuple(work), high.collective)


def _at_depth(low: list[TimelinePace], high: list[TimelinePace], at: float) -> list[TimelinePace]:
    """Return the deeper one's sections, with phases without blocks scaled to another depth."""
    with_blocks = {one.phase for one in high if one.block is not None} | {"loss"}
    shallow = iter([one for one in low if one.phase not in with_blocks])
    return [
        one if one.phase in with_blocks else _deeper(next(shallow, one), one, at) for one in high
    ]


def _deeper(low: TimelinePace, high: TimelinePace, at: float) -> TimelinePace:
    if len(low.work) != len(high.work):
        return high
    work = tuple(_between(one, two, at) for one, two in zip(low.work, high.work, strict=True))
    return high._replace(work=work)


def _between(one: TimelineLoad, two: TimelineLoad, at: float) -> TimelineLoad:
    """Return the load on the straight line through two: 0 is the first, 1 the second."""
    return TimelineLoad(
        *two[:2],
        max(one.times + (two.times - one.times) * at, 0.0),
        max(one.flops + (two.flops - one.flops) * at, 0.0),
        max(one.moved_bytes + (two.moved_bytes - one.moved_bytes) * at, 0.0),
        max(one.made_bytes + (two.made_bytes - one.made_bytes) * at, 0.0),
    )


def _sharded(
    step: list[TimelinePace], record: TraceRecord, traced: int, wanted: int
) -> list[TimelinePace]:
    """Return a step with another number of shards: update and padding of gathers change."""
    shapes, blocks = record.parameters, record.blocks
    own = shard_elements(shapes, wanted, blocks=blocks) / max(
        shard_elements(shapes, traced, blocks=blocks), 1
    )
    padding = {
        block: _padded(shapes, block, wanted) / max(_padded(shapes, block, traced), 1)
        for block in {shape.block for shape in shapes}
    }
    return [_with_shards(one, own, padding.get(one.block, 1.0), traced / wanted) for one in step]


def _with_shards(pace: TimelinePace, own: float, padding: float, shorter: float) -> TimelinePace:
    one = pace.collective
    if one is not None:
        # Copies all-reduce shards, which are smaller the more of them there are.
        factor = padding * shorter if one.between_copies else padding
        if one.kind in ("all_gather", "reduce_scatter") or one.between_copies:
            one = dataclasses.replace(one, moved_bytes=round(one.moved_bytes * factor))
        return pace._replace(collective=one)
    if pace.phase in _OF_MICRO_BATCHES:
        return pace
    work = tuple(
        load._replace(
            flops=load.flops * own,
            moved_bytes=load.moved_bytes * own,
            made_bytes=load.made_bytes * own,
        )
        for load in pace.work
    )
    return pace._replace(work=work)


def _padded(shapes: Sequence[Shape], block: int | None, shards: int) -> int:
    """Return the elements of a gathered block, including padding rows."""
    return sum(
        shards * math.ceil(one.shape[0] / shards) * math.prod(one.shape[1:])
        for one in shapes
        if one.block == block and one.shape
    )


def _timeline_parts(
    step: list[TimelinePace], record: TraceRecord, candidate: Candidate
) -> Iterator[TimelinePart]:
    """Insert blocks until the model has all of them, micro-batch by micro-batch."""
    last = max(pace.micro_batch for pace in step)
    rounds = [(0, (False, candidate.accumulation - 1))] if candidate.accumulation > 1 else []
    for micro_batch, when in [*rounds, (last, (True, 1))]:
        for phase in _OF_MICRO_BATCHES:
            own = [one for one in step if one.phase == phase and one.micro_batch == micro_batch]
            yield from _timeline_phase(own, phase, record, candidate, when)
    for phase in ("check", "update"):
        own = [one for one in step if one.phase == phase]
        yield from _timeline_phase(own, phase, record, candidate, (True, 1))


def _timeline_phase(
    paces: list[TimelinePace],
    phase: str,
    record: TraceRecord,
    candidate: Candidate,
    when: tuple[bool, int],
) -> Iterator[TimelinePart]:
    groups: dict[int | None, list[TimelinePace]] = {None: []}
    block: int | None = None
    for one in paces:  # work between blocks counts to the block before it
        block = block if one.block is None else one.block
        groups.setdefault(block, []).append(one)
    kept = {number: tuple(group) for number, group in groups.items()}
    order: list[int | None] = [None]
    if len(kept) > 1:
        whole = range(record.blocks)
        order += reversed(whole) if phase == "backward" else whole
    every = period(candidate)
    for number in order:
        like = None if number is None else _like(number, record, every)
        if kept.get(like):
            yield TimelinePart(
                phase=phase,
                block=number,
                last_micro_batch=when[0],
                times=when[1],
                paces=kept[like],
            )


def _like(block: int, record: TraceRecord, every: int) -> int:
    """Return the traced block that corresponds to this one: near an end, or in the middle."""
    reach = min(2 * every, record.blocks_traced // 2)
    if record.blocks_traced == record.blocks or block < reach:
        return block
    if block >= record.blocks - reach:
        return block - record.blocks + record.blocks_traced
    return every + block % every if record.blocks_traced >= 2 * every else block % reach


def gradient_bytes(record: TraceRecord) -> dict[int | None, int]:
    """Return the gradient bytes of each traced block's backward; None: layers after the last block.

    Layers before the first block count to it, since their gradients come last.
    """
    first = next((n for n, shape in enumerate(record.parameters) if shape.block is not None), 0)
    found: dict[int | None, int] = {}
    for number, shape in enumerate(record.parameters):
        if shape.trained:
            owner = 0 if shape.block is None and number < first else shape.block
            size = math.prod(shape.shape) * _SIZES.get(shape.dtype, 4)
            found[owner] = found.get(owner, 0) + size
    return found


def traced_like(block: int | None, record: TraceRecord) -> int | None:
    """Return the traced block whose parameters match a block of the whole model."""
    return None if block is None else _like(block, record, 1)
