"""Explain why nothing fits: the nearest candidate, and computed changes that would make it fit."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.plan.answer import Forecast, Offer
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.cluster_file import describe_hardware as in_words_of
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search import decide, offers
from torchmuster.plan.search.candidates import (
    CannotBeTraced,
    Explored,
    Look,
    Traces,
    explore_candidates,
    forecast_portions,
)
from torchmuster.plan.search.decide import describe_candidate
from torchmuster.plan.search.pruning import needs_more_than_states, outgrows
from torchmuster.plan.timing.rates import Rates
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes, plural

_MOST_MACHINES = 4096
_SHORTEST_SEQUENCE = 128
_HALVINGS = 3
_AS_NEAR = 1.03
# Fields that settings may have fixed, with the names of these settings.
_FIXED = {
    "strategy": "distributed.strategy",
    "sharding": "distributed.fsdp_sharding_strategy",
    "shard_size": "distributed.fsdp_shard_size",
    "cpu_offload": "distributed.fsdp_cpu_offload",
    "recompute": "train.activation_checkpointing",
    "micro_batch_size": "train.micro_batch_size",
}


def refusal(
    asked: PlanRequest, explored: Explored, look: Look, *, rates: Rates, simulate: bool = True
) -> Impossible:
    """Return the error that reports how much is missing, and what would help."""
    where, noun = in_words_of(asked.hardware), asked.hardware.card.noun
    changes = [*_changes(asked, explored, look, rates=rates, simulate=simulate)]
    nearest = nearest_of(explored)
    if nearest is None:
        why = _why_not_even_forecast(explored)
    elif nearest.spare_bytes < 0:
        why = (
            f"the nearest is {describe_candidate(nearest.candidate, noun)}: it needs "
            f"up to {format_bytes(nearest.memory.high_bytes)} (high end of the band), "
            f"{format_bytes(-nearest.spare_bytes)} more than a {noun} has "
            f"({format_bytes(asked.hardware.card.memory_bytes)})"
        )
    else:
        why = (
            f"the nearest is {describe_candidate(nearest.candidate, noun)}: it keeps "
            f"{format_bytes(nearest.memory.host_bytes)} in host memory, and each machine has "
            f"{format_bytes(asked.hardware.host_memory_bytes or 0)}"
        )
    fix = "\n".join(changes) or "use a smaller model: no single change makes this one fit"
    return Impossible(f"training this model does not fit on {where}", why=why, fix=fix)


def nearest_of(explored: Explored) -> Forecast | None:
    """Return the candidate that lacks the least memory; if several do, the one on most GPUs."""
    if not explored.forecasts:
        return None
    least = min(one.memory.high_bytes for one in explored.forecasts)
    near = (one for one in explored.forecasts if one.memory.high_bytes <= _AS_NEAR * least)
    return max(near, key=lambda one: (one.candidate.layout.ranks, one.spare_bytes))


def _why_not_even_forecast(explored: Explored) -> str:
    """Return which of the skipped candidates needs the least memory."""
    known = [one for one in explored.passed_over if one.needs_bytes is not None]
    least = min(known or explored.passed_over, key=lambda one: one.needs_bytes or 0, default=None)
    return "no configuration meets the request" if least is None else f"{least.name}: {least.why}"


def _changes(
    asked: PlanRequest, explored: Explored, look: Look, *, rates: Rates, simulate: bool
) -> Iterator[str]:
    """Yield each change that makes the model fit, the cheapest first."""
    yield from _left_open(asked, look, rates=rates)
    yield from _other_work(asked, explored, look, rates=rates)
    if offers.are_needed(asked, None):
        for one in offers.make_offers(asked, look, rates=rates, simulate=simulate):
            if one.forecast.fits:
                yield f"{one.flags} ({decide.describe_offer(one)}): {_offer_figures(one)}"
    yield from _more_cards(asked, explored, rates=rates)
    yield from _larger_card(asked, explored)


def _left_open(asked: PlanRequest, look: Look, *, rates: Rates) -> Iterator[str]:
    """Yield settings that only need to be left to the search."""
    for name, setting in _FIXED.items():
        if getattr(asked, name) is None or (name == "strategy" and asked.hardware.cards == 1):
            continue
        left_open: dict[str, Any] = {name: None}
        wider = dataclasses.replace(asked, **left_open)
        best = explore_candidates(wider, look, rates=rates).best
        if best is not None:
            yield f"leave {setting} unset: {_refusal_room(best, asked)}"


def _refusal_room(one: Forecast, asked: PlanRequest) -> str:
    return (
        f"{describe_candidate(one.candidate, asked.hardware.card.noun)} needs "
        f"{format_bytes(one.memory.high_bytes)} of {format_bytes(asked.hardware.card.memory_bytes)}"
    )


def _offer_figures(one: Offer) -> str:
    speed = "" if one.forecast.time is None else f", {decide.samples_per_second(one.forecast)}"
    return f"{_refusal_room(one.forecast, one.asked)}{speed}"


def _other_work(
    asked: PlanRequest, explored: Explored, look: Look, *, rates: Rates
) -> Iterator[str]:
    """Yield other training settings for the same model."""
    nearest = nearest_of(explored)
    if nearest is None:
        return
    way = dataclasses.replace(nearest.candidate, micro_batch_size=1, accumulation=1)
    work = asked.work

    def attempt(other: Work) -> Forecast | None:
        wished = dataclasses.replace(asked, work=other)
        return _first_that_fits(way, Traces(wished, look), wished, rates=rates)

    if work.torch_dtype in (None, "float32"):
        found = attempt(dataclasses.replace(work, torch_dtype="bfloat16"))
        if found:
            yield (
                "--set model.torch_dtype=bfloat16 (small updates are rounded away): "
                f"{_refusal_room(found, asked)}"
            )
    yield from _shorter(nearest, work, attempt, asked)


def _shorter(
    nearest: Forecast, work: Work, attempt: Callable[[Work], Forecast | None], asked: PlanRequest
) -> Iterator[str]:
    """Yield a shorter sequence length: halved until it should fit, then traced."""
    length, share = work.sequence_length, 1.0
    for _ in range(_HALVINGS):
        if length is None or length // 2 < _SHORTEST_SEQUENCE:
            return
        length, share = length // 2, share / 2
        if outgrows(nearest, share * nearest.candidate.micro_batch_size):
            continue
        found = attempt(dataclasses.replace(work, sequence_length=length))
        if found:
            yield f"--sequence-length {length}: {_refusal_room(found, asked)}"
            return


def _first_that_fits(
    way: Candidate, traces: Traces, asked: PlanRequest, *, rates: Rates
) -> Forecast | None:
    try:
        first = next(iter(forecast_portions(way, traces, asked, rates=rates)))
    except CannotBeTraced:
        return None
    return first if first.fits else None


def _more_cards(asked: PlanRequest, explored: Explored, *, rates: Rates) -> Iterator[str]:
    """Yield how many such machines hold the model, sharded over all of them."""
    if asked.strategy in ("single", "ddp") or asked.shard_size is not None:
        return
    nearest = nearest_of(explored)
    model = explored.model
    if nearest is not None and model is not None and needs_more_than_states(nearest, model):
        return
    has_blocks = model is not None and model.blocks > 1
    recompute = asked.recompute or ("full" if has_blocks else "none")

    def fitting(machines: int) -> Forecast | None:
        hardware = dataclasses.replace(asked.hardware, machines=machines)
        wished = dataclasses.replace(asked, hardware=hardware, global_batch_size=None)
        way = Candidate(
            strategy="fsdp",
            layout=ShardLayout(copies=1, shards=hardware.cards),
            precision=asked.precision.value,
            recompute=recompute,
        )
        return _first_that_fits(way, explored.traces, wished, rates=rates)

    least, most = asked.hardware.machines, 2 * asked.hardware.machines
    while (found := fitting(most)) is None:
        least, most = most, 2 * most
        if most > _MOST_MACHINES:
            return
    while most - least > 1:
        middle = (least + most) // 2
        attempt = fitting(middle)
        if attempt is None:
            least = middle
        else:
            most, found = middle, attempt
    cards = most * asked.hardware.cards_per_machine
    yield (
        f"{plural(cards, asked.hardware.card.noun)} ({plural(most, 'machine')}) instead of "
        f"{asked.hardware.cards}: {_refusal_room(found, asked)}"
    )


def _larger_card(asked: PlanRequest, explored: Explored) -> Iterator[str]:
    nearest = nearest_of(explored)
    if nearest is None or nearest.spare_bytes >= 0 or asked.hardware.card.kind == "cpu":
        return
    needed = nearest.memory.high_bytes
    known = sorted(
        map(catalogue.gpu_named, catalogue.known_gpus()), key=lambda one: one.memory_bytes
    )
    larger = next((one for one in known if one.memory_bytes >= needed), None)
    if larger is not None:
        yield (
            f"GPUs with {format_bytes(needed)}, such as {larger.name} "
            f"({format_bytes(larger.memory_bytes)}): "
            f"{describe_candidate(nearest.candidate, asked.hardware.card.noun)}"
        )
