"""Compute peaks of any depth and micro-batch size from traces of a few blocks.

The middle blocks of a model are identical. So the peak in each *place* of a step (a phase and a
block, counted from the first or the last block) is linear in the number of blocks and in the
micro-batch size: four traces, of two depths and two micro-batch sizes, determine all peaks.
Places are tracked separately because the place with the highest peak changes with depth and size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import CATEGORIES, Peak, TraceRecord

TOLERANCE = 0.001  # of a peak: allowed difference between a further trace and the computed peak


@dataclass(frozen=True, kw_only=True)
class DepthPlace:
    """A part of a step that models of all depths have."""

    phase: str
    micro_batch: int
    block: int | None  # 0, 1 from the first; -1, -2 from the last; None: outside of blocks
    after_block: int | None


@dataclass(frozen=True)
class Level:
    """The live memory at the peak of a place."""

    peak_bytes: float
    by_category: tuple[float, ...]  # in the order of CATEGORIES

    def plus(self, other: "Level", times: float) -> "Level":
        """Return this plus the other multiplied by ``times``."""
        return Level(
            self.peak_bytes + times * other.peak_bytes,
            tuple(
                one + times * two
                for one, two in zip(self.by_category, other.by_category, strict=True)
            ),
        )


Levels = Mapping[DepthPlace, Level]


def period(candidate: Candidate) -> int:
    """Return after how many blocks a model repeats: recomputing can skip blocks."""
    return candidate.recompute if isinstance(candidate.recompute, int) else 1


def traced_depths(candidate: Candidate) -> tuple[int, int]:
    """Return the two depths to trace; 2 blocks are not enough, since prefetching spans two."""
    every = period(candidate)
    return 3 * every, 4 * every


@dataclass(frozen=True, kw_only=True)
class Line:
    """A straight line through two traces, over depth, micro-batch size or another quantity."""

    low: int
    high: int

    def between(self, low: Levels, high: Levels, at: float) -> dict[DepthPlace, Level]:
        """Return the levels at another point; places that only one trace has are left out."""
        times = (at - self.low) / (self.high - self.low)
        return {
            place: low[place].plus(high[place].plus(low[place], -1.0), times)
            for place in low
            if place in high
        }


def levels(record: TraceRecord) -> dict[DepthPlace, Level]:
    """Return a record's peaks by place; a block in the middle can be two of them."""
    reach = 2 * period(record.request.candidate)
    whole = not is_part(record)
    found: dict[DepthPlace, Level] = {}
    for peak in record.peaks:
        categories = tuple(float(peak.by_category.get(name, 0)) for name in CATEGORIES)
        level = Level(float(peak.peak_bytes), categories)
        for place in _places(peak, record.blocks_traced, reach, whole):
            if place not in found or found[place].peak_bytes < level.peak_bytes:
                found[place] = level
    return found


def is_part(record: TraceRecord) -> bool:
    """Return whether a record has fewer blocks than the whole model."""
    return record.blocks_traced < record.blocks


def _places(peak: Peak, blocks: int, reach: int, whole: bool) -> Iterable[DepthPlace]:
    """Yield the place of a peak, counted from the first and from the last block if near enough."""
    if whole:
        yield DepthPlace(
            phase=peak.phase,
            micro_batch=peak.micro_batch,
            block=peak.block,
            after_block=peak.after_block,
        )
        return
    number = peak.block if peak.block is not None else peak.after_block
    seen = [number]
    if number is not None:
        seen = [number] if number < reach else []
        if blocks - number <= reach + blocks % (reach // 2):
            seen.append(number - blocks)
    for one in seen:
        yield DepthPlace(
            phase=peak.phase,
            micro_batch=peak.micro_batch,
            block=None if peak.block is None else one,
            after_block=one if peak.block is None else None,
        )


def at_depth(
    records: Sequence[TraceRecord], *, blocks: int, micro_batch_size: int
) -> dict[DepthPlace, Level]:
    """Return the levels of a model with ``blocks`` blocks and this micro-batch size.

    ``records`` differ only in depth and micro-batch size: two of each, or whole models of two
    sizes.
    """
    depths = sorted({record.blocks_traced for record in records})
    by_depth = {
        depth: _at_size(
            [record for record in records if record.blocks_traced == depth], micro_batch_size
        )
        for depth in depths
    }
    if blocks in by_depth:
        return by_depth[blocks]
    if len(depths) < 2:
        raise Impossible(
            f"the memory of {blocks} blocks cannot be computed from traces of {depths[0]}",
            why="two depths are needed to see what a block adds",
            fix="trace another depth, or the whole model",
        )
    low, high = depths[0], depths[1]
    return Line(low=low, high=high).between(by_depth[low], by_depth[high], blocks)


def _at_size(records: Sequence[TraceRecord], micro_batch_size: int) -> dict[DepthPlace, Level]:
    by_size = {record.request.candidate.micro_batch_size: levels(record) for record in records}
    if micro_batch_size in by_size:
        return by_size[micro_batch_size]
    sizes = sorted(by_size)
    if len(sizes) < 2:
        raise Impossible(
            f"the memory of micro-batches of {micro_batch_size} cannot be computed from "
            f"micro-batches of {sizes[0]}",
            why="two sizes are needed to see what a sample adds",
            fix="trace another micro-batch size",
        )
    line = Line(low=sizes[0], high=sizes[1])
    return line.between(by_size[sizes[0]], by_size[sizes[1]], micro_batch_size)


def highest(found: Levels) -> tuple[DepthPlace, Level]:
    """Return the place with the highest peak."""
    place = max(found, key=lambda one: found[one].peak_bytes)
    return place, found[place]


def as_peak(
    place: DepthPlace, level: Level, records: Sequence[TraceRecord], *, blocks: int
) -> Peak:
    """Return a computed peak in the form of a record, with the operation of the traced place."""
    like = _like(place, records)
    return Peak(
        phase=like.phase,
        micro_batch=place.micro_batch,
        block=_depth_number(place.block, blocks),
        after_block=_depth_number(place.after_block, blocks),
        peak_bytes=round(level.peak_bytes),
        by_category={
            name: round(size) for name, size in zip(CATEGORIES, level.by_category, strict=True)
        },
        operation=like.operation,
        module=like.module,
    )


def _depth_number(seen: int | None, blocks: int) -> int | None:
    return seen + blocks if seen is not None and seen < 0 else seen


def _like(place: DepthPlace, records: Sequence[TraceRecord]) -> Peak:
    """Return the traced peak at a place, in the deepest trace with the largest micro-batch."""
    record = max(
        records, key=lambda one: (one.blocks_traced, one.request.candidate.micro_batch_size)
    )
    reach = 2 * period(record.request.candidate)
    whole = not is_part(record)
    return max(
        (
            peak
            for peak in record.peaks
            if place in _places(peak, record.blocks_traced, reach, whole)
        ),
        key=lambda peak: peak.peak_bytes,
    )


def disagreement(computed_bytes: int, traced: TraceRecord) -> float:
    """Return the relative difference between a computed and a traced peak."""
    return abs(computed_bytes - traced.peak_bytes) / traced.peak_bytes
