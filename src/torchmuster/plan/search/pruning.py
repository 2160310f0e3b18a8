"""Bounds that need no further trace: candidates that cannot fit or cannot be faster."""

import math
from collections.abc import Sequence

from torchmuster.errors import MusterError
from torchmuster.plan.answer import Forecast, PassedOver, candidate_name, short_name
from torchmuster.plan.job import Candidate, Recompute
from torchmuster.plan.memory import closed_form
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.memory.shard_degree import ITEM_BYTES, OPTIMIZER_COPIES, inflation
from torchmuster.plan.record import TraceRecord
from torchmuster.plan.request import PlanRequest
from torchmuster.units import format_bytes, plural

# Rates that differ by less count as equal: forecasts are no more accurate than that.
SAME_RATE = 1.05
# Least cost of recomputing activations: the forward is a third of a step's matrix products.
_LEAST_COMPUTE = {"none": 1.0, "selective": 1.03, "full": 1.25}
# Recomputing may cost this much more than the least; larger micro-batches may be this much faster,
# unless they already have many tokens.
_CAUTION = 1.1
_MANY_TOKENS = 4096
_OF_SAMPLES = ("activations", "logits")
_OF_GROWTH = 0.8  # least share of the growth per sample: a single sample lacks some copies
_WORTH_SHARDING = 0.1  # share of a step spent waiting, where a whole copy fits
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOST_INFLATION = 1.05  # of gathered bytes, by padding rows


def too_large(candidate: Candidate, asked: PlanRequest, record: TraceRecord) -> PassedOver | None:
    """Skip a candidate whose weights, gradients and moments alone exceed the memory of a GPU."""
    least = states_bytes(record, candidate)
    if least <= asked.hardware.card.memory_bytes:
        return None
    return PassedOver(
        name=_over_some(candidate_name(candidate), candidate, asked),
        why=f"weights, gradients and optimizer states alone need at least {format_bytes(least)}, "
        f"and a "
        f"{asked.hardware.card.noun} has {format_bytes(asked.hardware.card.memory_bytes)}",
        needs_bytes=least,
        of_states=True,
    )


def _over_some(name: str, candidate: Candidate, asked: PlanRequest) -> str:
    """Return the name, with the number of GPUs if only some are used: on all of them it may fit."""
    ranks = candidate.layout.ranks
    return (
        name
        if ranks in (1, asked.hardware.cards)
        else f"{name} over {plural(ranks, asked.hardware.card.noun)}"
    )


def by_formula(candidate: Candidate, asked: PlanRequest) -> Memory | None:
    """Return a candidate's memory by the formula; None if there is no formula for this model."""
    try:
        return closed_form.estimate_memory(asked.work, candidate, hardware=asked.hardware)
    except MusterError:
        return None


def too_large_by_formula(candidate: Candidate, asked: PlanRequest) -> PassedOver | None:
    """Skip a candidate that does not fit even by the low end of the formula."""
    needed = by_formula(candidate, asked)
    if needed is None or needed.low_bytes <= asked.hardware.card.memory_bytes:
        return None
    return PassedOver(
        name=_over_some(short_name(candidate), candidate, asked),
        why=f"needs at least about {format_bytes(needed.low_bytes)} by a formula, and a "
        f"{asked.hardware.card.noun} has {format_bytes(asked.hardware.card.memory_bytes)}",
        needs_bytes=needed.low_bytes,
    )


def outgrows(one: Forecast, micro_batch_size: float) -> bool:
    """Return whether a candidate exceeds its GPU with another micro-batch size.

    The position of the peak may change with the size, but only to a higher peak.
    """
    samples = sum(one.memory.by_category.get(name, 0) for name in _OF_SAMPLES)
    more = micro_batch_size / one.candidate.micro_batch_size - 1.0
    card_bytes = one.spare_bytes + one.memory.high_bytes
    return one.memory.low_bytes + _OF_GROWTH * more * samples > card_bytes


def needs_more_than_states(one: Forecast, record: TraceRecord) -> bool:
    """Return whether a candidate exceeds its GPU even without weights, gradients and moments.

    Then neither more shards nor offloading would help.
    """
    card_bytes = one.spare_bytes + one.memory.high_bytes
    return one.memory.low_bytes - states_bytes(record, one.candidate) > card_bytes


def states_bytes(record: TraceRecord, candidate: Candidate) -> int:
    """Return the least bytes of weights, gradients and moments on a rank."""
    if candidate.cpu_offload:
        return 0
    item_bytes = _item_bytes(record)
    trained = record.trained_count * item_bytes
    whole = record.parameter_count * item_bytes
    states = whole + trained * (1 + OPTIMIZER_COPIES[record.request.work.optimizer])
    least = states / candidate.layout.shards
    if candidate.strategy == "fsdp" and not candidate.reshard:
        # Gathered weights stay until the backward.
        gathered = min(float(_COMPUTE_BYTES[candidate.precision]), item_bytes)
        least += record.parameter_count * gathered
    return int(least)


def _item_bytes(record: TraceRecord) -> float:
    """Return the mean bytes per element: traces of few blocks have all dtypes of a model."""
    counts = [(math.prod(one.shape), ITEM_BYTES.get(one.dtype, 1)) for one in record.parameters]
    elements = sum(count for count, _ in counts)
    return sum(count * size for count, size in counts) / max(elements, 1)


def too_many_shards(candidate: Candidate, record: TraceRecord) -> PassedOver | None:
    """Skip a candidate with more shards than rows per parameter, if hybrid sharding is possible."""
    if candidate.strategy != "fsdp" or candidate.layout.shards < 2:
        return None
    times = inflation(record.parameters, candidate.layout.shards)
    if times <= _MOST_INFLATION:
        return None
    shards = "" if candidate.layout.copies > 1 else f" over {candidate.layout.shards:,} shards"
    return PassedOver(
        name=f"{candidate_name(candidate)}{shards}",
        why=f"parameters have fewer rows than shards: all-gathers transfer {times:.2f} times the "
        f"model",
    )


def rate_bound(forecasts: Sequence[Forecast], candidate: Candidate) -> float | None:
    """Return an upper bound of samples per second: compute only, at the best rate seen.

    None if nothing was forecast yet.
    """
    paces = [_pace(one, candidate.recompute) for one in forecasts if one.time is not None]
    if not paces or min(paces) <= 0.0:
        return None
    return candidate.layout.ranks / min(paces)


def _pace(one: Forecast, recompute: Recompute) -> float:
    """Return the least seconds of compute per sample on a rank, with this share recomputed."""
    time, candidate = one.time, one.candidate
    assert time is not None, "only a forecast with a time has seconds per sample"
    of_sample = time.compute_s * candidate.layout.ranks / candidate.global_batch_size
    own, wanted = _least_compute(candidate.recompute), _least_compute(recompute)
    tokens = (time.tokens_per_s or 0.0) / time.samples_per_s * candidate.micro_batch_size
    if own > wanted or tokens < _MANY_TOKENS:
        return of_sample * wanted / own / _CAUTION
    return of_sample * wanted / own


def _least_compute(recompute: Recompute) -> float:
    if isinstance(recompute, int):
        return 1.0 + (_LEAST_COMPUTE["full"] - 1.0) / recompute
    return _LEAST_COMPUTE[recompute]


def copies_wait(best: Forecast) -> bool:
    """Return whether ddp waits so long for communication that sharding could be faster.

    Sharding sends as much as ddp, only at other times.
    """
    if best.candidate.strategy != "ddp" or best.time is None:
        return True
    return best.time.exposed_s > _WORTH_SHARDING * best.time.step_s


def needs_recompute(forecasts: Sequence[Forecast], way: Candidate, asked: PlanRequest) -> bool:
    """Return whether recomputing activations could help a candidate at all.

    A candidate that fits without it gains only fewer gathers from larger micro-batches, and ddp has
    none.
    """
    tried = [
        one
        for one in forecasts
        if _spread(one.candidate) == _spread(way) and one.candidate.recompute == "none"
    ]
    if way.strategy != "fsdp":
        return not any(one.fits for one in tried)
    if not tried or any(not one.fits for one in tried):
        return True
    largest = max(tried, key=lambda one: one.candidate.micro_batch_size)
    could_grow = asked.global_batch_size is None or largest.candidate.accumulation > 1
    return could_grow and outgrows(largest, 2 * largest.candidate.micro_batch_size)


def _spread(one: Candidate) -> tuple[object, ...]:
    return one.strategy, one.layout, one.reshard, one.cpu_offload
