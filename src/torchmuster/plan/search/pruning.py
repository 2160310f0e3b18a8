"""Bounds that need no further trace: ways that cannot fit, and ways that cannot be faster."""

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

# Two rates that differ by less are equal: forecasts are no better than that.
SAME_RATE = 1.05
# What computing activations again costs at the least: the forward is a third of a step's products.
_LEAST_COMPUTE = {"none": 1.0, "selective": 1.03, "full": 1.25}
# Computing again may cost so much more than the least; and larger micro-batches may compute so much faster,
# but for those that have many tokens already.
_CAUTION = 1.1
_MANY_TOKENS = 4096
_OF_SAMPLES = ("activations", "logits")
_OF_GROWTH = 0.8  # what is at least true of the growth by samples: a single one lacks some copies
_WORTH_SHARDING = 0.1  # of a step that is spent waiting, where a whole copy fits
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOST_INFLATION = 1.05  # of what is gathered, by rows that do not exist


def too_large(candidate: Candidate, asked: PlanRequest, record: TraceRecord) -> PassedOver | None:
    """Say so if weights, gradients and moments alone are more than a card has."""
    least = states_bytes(record, candidate)
    if least <= asked.hardware.card.memory_bytes:
        return None
    return PassedOver(
        name=_over_some(candidate_name(candidate), candidate, asked),
        why=f"weights, gradients and optimiser alone take at least {format_bytes(least)} of the "
        f"{format_bytes(asked.hardware.card.memory_bytes)} of a {asked.hardware.card.noun}",
        needs_bytes=least,
        of_states=True,
    )


def _over_some(name: str, candidate: Candidate, asked: PlanRequest) -> str:
    """Name a way that leaves cards alone by those it takes: over all of them it may well fit."""
    ranks = candidate.layout.ranks
    return (
        name
        if ranks in (1, asked.hardware.cards)
        else f"{name} over {plural(ranks, asked.hardware.card.noun)}"
    )


def by_formula(candidate: Candidate, asked: PlanRequest) -> Memory | None:
    """Return what a way takes by the usual formula; None where there is none for this model."""
    try:
        return closed_form.estimate_memory(asked.work, candidate, hardware=asked.hardware)
    except MusterError:
        return None


def too_large_by_formula(candidate: Candidate, asked: PlanRequest) -> PassedOver | None:
    """Say so if a way is so far from fitting that a formula is enough to see it."""
    needed = by_formula(candidate, asked)
    if needed is None or needed.low_bytes <= asked.hardware.card.memory_bytes:
        return None
    return PassedOver(
        name=_over_some(short_name(candidate), candidate, asked),
        why=f"at least about {format_bytes(needed.low_bytes)} by a formula, more than the "
        f"{format_bytes(asked.hardware.card.memory_bytes)} of a {asked.hardware.card.noun}",
        needs_bytes=needed.low_bytes,
    )


def outgrows(one: Forecast, micro_batch_size: float) -> bool:
    """Say whether a way is larger than its card with micro-batches of another size, going by what samples take.

    Where the peak is may change with the size, but then to what is larger still.
    """
    samples = sum(one.memory.by_category.get(name, 0) for name in _OF_SAMPLES)
    more = micro_batch_size / one.candidate.micro_batch_size - 1.0
    card_bytes = one.spare_bytes + one.memory.high_bytes
    return one.memory.low_bytes + _OF_GROWTH * more * samples > card_bytes


def needs_more_than_states(one: Forecast, record: TraceRecord) -> bool:
    """Say whether a way would be larger than its card even without weights, gradients and moments.

    Then neither more shards nor a place for them elsewhere would help.
    """
    card_bytes = one.spare_bytes + one.memory.high_bytes
    return one.memory.low_bytes - states_bytes(record, one.candidate) > card_bytes


def states_bytes(record: TraceRecord, candidate: Candidate) -> int:
    """Return the least that weights, gradients and moments take on a rank, whatever a step does."""
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
    """Return the mean size of an element: traces of few blocks have all types that a model has."""
    counts = [(math.prod(one.shape), ITEM_BYTES.get(one.dtype, 1)) for one in record.parameters]
    elements = sum(count for count, _ in counts)
    return sum(count * size for count, size in counts) / max(elements, 1)


def too_many_shards(candidate: Candidate, record: TraceRecord) -> PassedOver | None:
    """Say so if parameters have fewer rows than there are shards, and copies can be made instead."""
    if candidate.strategy != "fsdp" or candidate.layout.shards < 2:
        return None
    times = inflation(record.parameters, candidate.layout.shards)
    if times <= _MOST_INFLATION:
        return None
    shards = "" if candidate.layout.copies > 1 else f" over {candidate.layout.shards:,} shards"
    return PassedOver(
        name=f"{candidate_name(candidate)}{shards}",
        why=f"parameters have fewer rows than that: {times:.2f} times the model would be gathered",
    )


def rate_bound(forecasts: Sequence[Forecast], candidate: Candidate) -> float | None:
    """Return the most samples a second that a way can reach: nothing but computing, at the best pace seen.

    None where nothing was forecast yet.
    """
    paces = [_pace(one, candidate.recompute) for one in forecasts if one.time is not None]
    if not paces or min(paces) <= 0.0:
        return None
    return candidate.layout.ranks / min(paces)


def _pace(one: Forecast, recompute: Recompute) -> float:
    """Return the seconds that a rank computes for a sample, at the least, if so much is computed again."""
    time, candidate = one.time, one.candidate
    assert time is not None, "only what has a time has a pace"
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
    """Say whether copies of the model wait so long for each other that shards could be faster.

    Sharding sends as much as copying, only at other times.
    """
    if best.candidate.strategy != "ddp" or best.time is None:
        return True
    return best.time.exposed_s > _WORTH_SHARDING * best.time.step_s


def needs_recompute(forecasts: Sequence[Forecast], way: Candidate, asked: PlanRequest) -> bool:
    """Say whether computing activations again could help a way at all.

    What fits without it gains nothing from larger micro-batches but fewer gathers: copies have none.
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
