"""Peaks with any number of shards, from traces of two.

FSDP gives each rank ``ceil(rows / shards)`` rows of a parameter's first dimension. Nothing else of a step depends on the
number of shards, so a peak is a straight line over the elements of a rank's shards. What is gathered and
reduced has ``shards x ceil(rows / shards)`` rows: with more shards than rows that is far more than the model. How many
rows are made up depends on the rows, so the blocks and what lies outside of them are padded apart.
Tracing many shards takes long (a trace of 16,384 takes minutes), and is never needed; a few that divide no
model evenly are traced themselves, as that is exact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmuster.finding import Finding, Status
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory.depth import DepthPlace, Level, Levels, Line
from torchmuster.plan.record import CATEGORIES, Shape, TraceRecord
from torchmuster.units import format_bytes

SMALL, LARGE = 8, 64  # shards that are traced where there are more than the smaller number
_WORTH_SAYING = 1.05  # so many times the model's own bytes in a gathered block
_GATHERED = CATEGORIES.index("collectives")
_ITEM_BYTES = (2, 4)  # of what is gathered and reduced
_UNIT_BYTES = min(_ITEM_BYTES)
_MOST_AT_ONCE = 8  # times what lies outside of blocks can be there: gathered, being sent, reduced


def traced_degrees(shards: int) -> tuple[int, ...]:
    """Return how many shards are traced to know the memory of ``shards``."""
    uneven = shards & (shards - 1) != 0  # no power of two: it divides the rows of few models
    return (shards,) if shards <= SMALL or (uneven and shards < LARGE) else (SMALL, LARGE)


def shard_elements(shapes: Sequence[Shape], shards: int, *, blocks: int) -> int:
    """Return how many elements a rank's shards have, of a model of so many blocks."""
    return sum(times * _shard(shape, shards) for shape, times in with_times(shapes, blocks))


def inflation(shapes: Sequence[Shape], shards: int) -> float:
    """Return how many times its own size a gathered block takes, for the rows that are made up."""
    block = [shape for shape in shapes if shape.block is not None] or list(shapes)
    first = [shape for shape in block if shape.block == block[0].block]
    whole = sum(math.prod(shape.shape) for shape in first)
    return shards * sum(_shard(shape, shards) for shape in first) / whole if whole else 1.0


def _shard(shape: Shape, shards: int) -> int:
    if not shape.shape:
        return 1  # a single number is on every rank
    rows, *rest = shape.shape
    return math.ceil(rows / shards) * math.prod(rest)


def with_times(shapes: Sequence[Shape], blocks: int) -> list[tuple[Shape, int]]:
    """Return each shape with how often the model has it: those of one block stand for all of them."""
    numbers = {shape.block for shape in shapes if shape.block is not None}
    if not numbers:
        return [(shape, 1) for shape in shapes]
    if len(numbers) >= blocks:  # the whole model was traced
        return [(shape, 1) for shape in shapes]
    one = min(numbers)
    return [
        (shape, 1 if shape.block is None else blocks)
        for shape in shapes
        if shape.block is None or shape.block == one
    ]


def at_degree(
    small: Levels, large: Levels, record: TraceRecord, *, shards: int, blocks: int
) -> dict[DepthPlace, Level]:
    """Return the levels with so many shards, from those with 8 and with 64."""
    shapes = record.parameters
    few, many, wanted = (
        shard_elements(shapes, number, blocks=blocks) for number in (SMALL, LARGE, shards)
    )
    if few == many:
        return dict(small)
    line = Line(low=few, high=many)
    nothing = line.between(small, large, 0)  # without what is in proportion to a rank's shards
    padding = _Padding(
        shapes, shards, beyond=(wanted - few) / (many - few), at_0=few / (few - many)
    )
    return {
        place: _with_more(level, padding.more_bytes(nothing[place].by_category[_GATHERED]))
        for place, level in line.between(small, large, wanted).items()
    }


def _with_more(level: Level, gathered_bytes: float) -> Level:
    categories = list(level.by_category)
    categories[_GATHERED] += gathered_bytes
    return Level(level.peak_bytes + gathered_bytes, tuple(categories))


class _Padding:
    """What made-up rows add to a line through 8 and 64 shards: for a block, and for what lies outside of blocks."""

    def __init__(self, shapes: Sequence[Shape], shards: int, *, beyond: float, at_0: float) -> None:
        first = min((one.block for one in shapes if one.block is not None), default=None)
        block = [one for one in shapes if one.block is not None and one.block == first]
        outside = [one for one in shapes if one.block is None]
        self._own: list[float] = []
        self._more: list[float] = []
        for group in (outside, block):
            low, high, true = (_gathered(group, one) for one in (SMALL, LARGE, shards))
            self._own.append(_UNIT_BYTES * (low + (high - low) * at_0))
            self._more.append(_UNIT_BYTES * (true - low - (high - low) * beyond))

    def more_bytes(self, gathered: float) -> float:
        """Return what is missing of so many gathered bytes.

        They are so many times the one group and so many times the other; only one way to put them together fits.
        """
        outside, block = self._own
        ways = []
        for times in range(_MOST_AT_ONCE + 1 if outside else 1):
            rest = gathered - times * outside
            blocks = max(round(rest / block), 0) if block else 0
            ways.append((abs(rest - blocks * block), times, blocks))
        _, times, blocks = min(ways)
        return times * self._more[0] + blocks * self._more[1]


def _gathered(group: Iterable[Shape], shards: int) -> int:
    return shards * sum(_shard(shape, shards) for shape in group)


def shard_sizes(
    shapes: Sequence[Shape], traced: Sequence[int], *, shards: int
) -> dict[tuple[int, ...], int]:
    """Return sizes with so many shards by those with each traced number of them.

    They are those of parameters, of all of a block and of all outside of blocks: a rank's shards, and gathered. Where
    several are alike with the traced numbers, it is their mean: they are there together.
    """
    numbers = (*traced, shards)
    groups = [[one] for one in shapes]
    groups += [[one for one in shapes if one.block == block] for block in {s.block for s in shapes}]
    found: dict[tuple[int, ...], list[int]] = {}
    for group in groups:
        for item in _ITEM_BYTES:
            whole = [item * _gathered(group, number) for number in numbers]
            shard = [size // number for size, number in zip(whole, numbers, strict=True)]
            for *of_traced, wanted in (whole, shard):
                found.setdefault(tuple(of_traced), []).append(wanted)
    return {key: round(sum(values) / len(values)) for key, values in found.items()}


def degree_findings(record: TraceRecord, *, shards: int) -> list[Finding]:
    """Say so where shards are so many that gathers carry rows that do not exist."""
    times = inflation(record.parameters, shards)
    if times < _WORTH_SAYING:
        return []
    rows = min(
        shape.shape[0] for shape in record.parameters if shape.shape and shape.block is not None
    )
    block = [shape for shape in record.parameters if shape.block == 0]
    own = sum(4 * math.prod(shape.shape) for shape in block)
    return [
        Finding(
            name="shards-beyond-rows",
            status=Status.WARNING,
            what=f"with {shards} shards each gathered block takes {times:.2f} times its own size",
            why=f"FSDP gives each rank whole rows, and some parameters have {rows} rows only: the rest is "
            f"made up, gathered and reduced ({format_bytes(round(own * times))} for a block of "
            f"{format_bytes(own)} in fp32)",
            fix="hybrid sharding: copies that are sharded over fewer ranks each "
            "(distributed.fsdp_sharding_strategy: hybrid_shard)",
        )
    ]


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
OPTIMIZER_COPIES = {"adamw": 2, "sgd": 1}  # of each trained parameter: two averages; a momentum


@dataclass(frozen=True, kw_only=True)
class SavingMemory:
    """Bytes of one save."""

    checkpoint_bytes: int  # on the disk
    host_bytes: int  # of one machine, while saving goes on beside the training


def saving_memory(
    shapes: Sequence[Shape],
    work: Work,
    candidate: Candidate,
    *,
    blocks: int,
    ranks_per_machine: int,
) -> SavingMemory:
    """Return what a save of a model of so many blocks takes."""
    whole = 0
    for shape, times in with_times(shapes, blocks):
        copies = 1 + (OPTIMIZER_COPIES[work.optimizer] if shape.trained else 0)
        whole += copies * times * math.prod(shape.shape) * ITEM_BYTES.get(shape.dtype, 1)
    here = min(ranks_per_machine, candidate.layout.ranks)
    return SavingMemory(checkpoint_bytes=whole, host_bytes=whole * here // candidate.layout.ranks)
