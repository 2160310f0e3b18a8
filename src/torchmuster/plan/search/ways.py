"""Which ways to train there are: how the model is spread, and how large a rank's portions can be."""

import math
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.errors import Impossible
from torchmuster.plan.asked import Asked
from torchmuster.plan.job import Candidate, Recompute
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import plural

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # the simplest first
# Where no global batch is given, a rank has at most what muster train gives it by itself: how many samples a step has
# changes what is learnt, and how many samples there are is not known here.
USUAL_MICRO_BATCH_SIZE = 8


def spreads(asked: Asked) -> list[Candidate]:
    """Return the ways to spread the model, the simplest first, each with the smallest portions.

    All cards, one machine or one card: more of them may be slower, and must never be worse.
    """
    found = [one for one in _all_spreads(asked) if _is_asked_for(one, asked)]
    if not found:
        raise Impossible(
            f"no way to spread the model over {plural(asked.hardware.cards, asked.hardware.card.noun)} is as it was asked for",
            why=_fixed(asked),
            fix="leave one of them out",
        )
    return found


def _all_spreads(asked: Asked) -> Iterator[Candidate]:
    hardware = asked.hardware
    precision = asked.precision.value
    one = ShardLayout(copies=1, shards=1)
    yield Candidate(strategy="single", layout=one, precision=precision)
    sizes = sorted({hardware.cards_per_machine, hardware.cards} - {1})
    for ranks in reversed(sizes):
        layout = ShardLayout(copies=ranks, shards=1)
        yield Candidate(strategy="ddp", layout=layout, precision=precision)
    for ranks in reversed(sizes or ([1] if asked.strategy == "fsdp" else [])):
        for layout in _layouts(asked, ranks):
            for reshard in (True, False):
                if reshard or layout.copies == 1:  # shard_grad_op shards over all ranks
                    yield Candidate(
                        strategy="fsdp", layout=layout, reshard=reshard, precision=precision
                    )
    for ranks in reversed(sizes or [1]):
        for layout in _layouts(asked, ranks):
            yield Candidate(strategy="fsdp", layout=layout, cpu_offload=True, precision=precision)


def _layouts(asked: Asked, ranks: int) -> Iterator[ShardLayout]:
    """Yield one copy over all ranks, and copies over whole machines, as many as divide evenly; or what was asked for."""
    size = asked.shard_size
    if size is not None:
        if ranks % size == 0 and (size > 1 or ranks == 1):
            yield ShardLayout(copies=ranks // size, shards=size)
        return
    each = asked.hardware.cards_per_machine
    yield ShardLayout(copies=1, shards=ranks)
    machines = ranks // each
    for together in range(machines // 2, 0, -1):
        is_power = together & (together - 1) == 0
        if machines % together == 0 and (is_power or machines <= 64) and together * each > 1:
            yield ShardLayout(copies=machines // together, shards=together * each)


def _is_asked_for(one: Candidate, asked: Asked) -> bool:
    if asked.strategy is not None and one.strategy != asked.strategy:
        return False
    # Who names a strategy means all cards; ranks on a CPU are as many as were asked for.
    all_of_them = asked.strategy in ("ddp", "fsdp") or asked.hardware.card.kind == "cpu"
    if all_of_them and one.layout.ranks != asked.hardware.cards:
        return False
    if asked.cpu_offload is not None and one.cpu_offload != asked.cpu_offload:
        return False
    if asked.shard_size is not None and one.layout.shards != asked.shard_size:
        return False
    return asked.sharding is None or _kind(one) == asked.sharding


def _kind(one: Candidate) -> str:
    if one.strategy != "fsdp":
        return ""
    if one.layout.copies > 1:
        return "hybrid_shard"
    return "full_shard" if one.reshard else "shard_grad_op"


def _fixed(asked: Asked) -> str:
    names = ("strategy", "sharding", "shard_size", "cpu_offload")
    given = {name: getattr(asked, name) for name in names}
    return "fixed: " + ", ".join(
        f"{name} {value}" for name, value in given.items() if value is not None
    )


def recomputing(asked: Asked) -> tuple[Recompute, ...]:
    """Return how activations may be kept, the simplest first."""
    return RECOMPUTE if asked.recompute is None else (asked.recompute,)


def portions(spread: Candidate, asked: Asked) -> Iterator[Candidate]:
    """Yield a spread with every size of its micro-batches that makes sense, the smallest first."""
    ranks = spread.layout.ranks
    if asked.global_batch_size is None:
        sizes = [2**power for power in range(USUAL_MICRO_BATCH_SIZE.bit_length())]
        if asked.micro_batch_size is not None:
            sizes = [asked.micro_batch_size]
        yield from (replace(spread, micro_batch_size=size) for size in sizes)
        return
    of_each = math.ceil(asked.global_batch_size / ranks)
    sizes = sorted({size for size in range(1, of_each + 1) if _is_handy(size, of_each)})
    if asked.micro_batch_size is not None:
        sizes = [min(asked.micro_batch_size, of_each)]
    for size in sizes:
        yield replace(spread, micro_batch_size=size, accumulation=math.ceil(of_each / size))


def _is_handy(size: int, of_each: int) -> bool:
    return of_each % size == 0 or size & (size - 1) == 0
