"""Compute peaks with any number of shards from traces of two.

FSDP gives each rank ``ceil(rows / shards)`` rows of a parameter's first dimension. Nothing else in
a step depends on the number of shards, so a peak is linear in the elements of a rank's shards.
Gathered and reduced tensors have ``shards x ceil(rows / shards)`` rows: with more shards than rows
that is far more than the model. The number of padding rows depends on the rows, so the blocks and
the parameters outside them are padded separately.

Tracing many shards takes long (minutes for 16,384) and is never needed; small numbers that divide
no model evenly are traced themselves, which is exact.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.finding import Finding, Status
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory.depth import DepthPlace, Level, Levels, Line
from torchmuster.plan.record import CATEGORIES, Shape, TraceRecord
from torchmuster.units import format_bytes

SMALL, LARGE = 8, 64  # numbers of shards to trace if there are more than the smaller one
_WORTH_SAYING = 1.05  # report from this ratio of a gathered block to its own bytes
_GATHERED = CATEGORIES.index("collectives")
_ITEM_BYTES = (2, 4)  # of what is gathered and reduced
_UNIT_BYTES = min(_ITEM_BYTES)
_MOST_AT_ONCE = 8  # most copies of parameters outside blocks: gathered, in transit, reduced


def traced_degrees(shards: int) -> tuple[int, ...]:
    """Return the numbers of shards to trace for the memory of ``shards``."""
    uneven = shards & (shards - 1) != 0  # not a power of two: it divides the rows of few models
    return (shards,) if shards <= SMALL or (uneven and shards < LARGE) else (SMALL, LARGE)


def shard_elements(shapes: Sequence[Shape], shards: int, *, blocks: int) -> int:
    """Return the elements of a rank's shards, for a model with ``blocks`` blocks."""
    return sum(times * _shard(shape, shards) for shape, times in with_times(shapes, blocks))


def inflation(shapes: Sequence[Shape], shards: int) -> float:
    """Return the ratio of a gathered block to its own size, caused by padding rows."""
    block = [shape for shape in shapes if shape.block is not None] or list(shapes)
    first = [shape for shape in block if shape.block == block[0].block]
    whole = sum(math.prod(shape.shape) for shape in first)
    return shards * sum(_shard(shape, shards) for shape in first) / whole if whole else 1.0


def _shard(shape: Shape, shards: int) -> int:
    if not shape.shape:
        return 1  # a scalar is on every rank
    rows, *rest = shape.shape
    return math.ceil(rows / shards) * math.prod(rest)


def with_times(shapes: Sequence[Shape], blocks: int) -> list[tuple[Shape, int]]:
    """Return each shape with how often the model has it: one block represents all of them."""
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
    """Return the levels with ``shards`` shards, from those with 8 and with 64."""
    shapes = record.parameters
    few, many, wanted = (
        shard_elements(shapes, number, blocks=blocks) for number in (SMALL, LARGE, shards)
    )
    if few == many:
        return dict(small)
    line = Line(low=few, high=many)
    nothing = line.between(small, large, 0)  # without the part proportional to a rank's shards
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
    """What padding rows add to the line through 8 and 64 shards: inside and outside blocks."""

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
        """Return the padding to add to a number of gathered bytes.

        The bytes are a sum of multiples of the two groups; only one combination matches.
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
    """Return sizes with ``shards`` shards by the sizes with each traced number of shards.

    They are the sizes of parameters, of a whole block and of everything outside blocks: sharded and
    gathered. If several have equal traced sizes, their mean is used: they are live together.
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
    """Report if there are so many shards that gathers carry padding rows."""
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
            why=f"FSDP gives each rank whole rows, and some parameters have only {rows} rows: the "
            "rest is padding, which is gathered and reduced "
            f"({format_bytes(round(own * times))} for a block of {format_bytes(own)} in fp32)",
            fix="use hybrid sharding, with fewer shards per copy "
            "(distributed.fsdp_sharding_strategy: hybrid_shard)",
        )
    ]


# nf4: half a byte, a scale of 8 bits for 64 weights, and one of 32 bits for 256 of these.
FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
ITEM_BYTES: Mapping[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "nf4": FOUR_BIT_BYTES,
}
# Sizes of the optimizer's states, in copies of the trained parameters: two moments, a momentum. At
# least, because muon has two moments of some parameters, and a function's optimizer is unknown.
OPTIMIZER_COPIES: Mapping[str, float] = defaultdict(
    float, {"adamw": 2, "sgd": 1, "muon": 1, "adafactor": 0, "adamw_8bit": 0.5}
)


@dataclass(frozen=True, kw_only=True)
class SavingMemory:
    """Bytes of one save."""

    checkpoint_bytes: int  # on disk
    host_bytes: int  # of one machine, during an async save


def saving_memory(
    shapes: Sequence[Shape],
    work: Work,
    candidate: Candidate,
    *,
    blocks: int,
    ranks_per_machine: int,
) -> SavingMemory:
    """Return the bytes of a save of a model with ``blocks`` blocks.

    Frozen parameters of a Hugging Face model are not saved: its files have them.
    """
    whole = 0
    for shape, times in with_times(shapes, blocks):
        if not shape.trained and work.model_name_or_path is not None:
            continue
        copies = 1 + (OPTIMIZER_COPIES[work.optimizer] if shape.trained else 0)
        size = round(math.prod(shape.shape) * ITEM_BYTES.get(shape.dtype, 1))
        whole += round(copies * times * size)
    here = min(ranks_per_machine, candidate.layout.ranks)
    return SavingMemory(checkpoint_bytes=whole, host_bytes=whole * here // candidate.layout.ranks)
