"""LoRA and QLoRA as offers, for a model whose full training does not fit, or only with CPU offload.

An offer changes what is trained, so it is never chosen. It is forecast like any other plan, with
the simplest strategies only: a copy on each GPU or, for LoRA, full shards.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.plan.answer import Forecast, Offer
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory.forecast import caches_memory
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search import decide
from torchmuster.plan.search.candidates import (
    Explored,
    Look,
    explore_candidates,
    forecast_by_formula,
    search_order,
)
from torchmuster.plan.search.pruning import too_large_by_formula
from torchmuster.plan.search.simulated import simulate_preferred
from torchmuster.plan.timing.rates import Rates

RANK = 16  # of LoRA's matrices, where none is requested
# Frozen weights lose nothing in 16 bits: only the matrices in float32 are updated.
_FROZEN = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class _Kind:
    name: str
    four_bits: bool


_KINDS = (_Kind(name="LoRA", four_bits=False), _Kind(name="QLoRA", four_bits=True))


def are_needed(asked: PlanRequest, best: Forecast | None) -> bool:
    """Return whether to offer LoRA: the model fits nowhere, or only with CPU offload."""
    if asked.work.model_name_or_path is None:
        return False
    return best is None or (best.candidate.cpu_offload and asked.cpu_offload is not True)


def make_offers(
    asked: PlanRequest, look: Look, *, rates: Rates, simulate: bool = True
) -> Iterator[Offer]:
    """Yield LoRA and QLoRA with their forecasts; those that are already requested are left out."""
    for kind in _KINDS:
        work = _adapted_work(asked, kind)
        if work == asked.work or (asked.work.load_in_4bit and not kind.four_bits):
            continue
        offer = _forecast_offer(
            kind, _offer_request(asked, work), asked, look, rates=rates, simulate=simulate
        )
        if offer is not None:
            yield offer


def _adapted_work(asked: PlanRequest, kind: _Kind) -> Work:
    work = asked.work
    dtype = work.torch_dtype
    if dtype in (None, "float32"):
        dtype = _FROZEN.get(asked.precision.value, dtype)
    return dataclasses.replace(
        work,
        lora_rank=work.lora_rank or RANK,
        torch_dtype=dtype,
        load_in_4bit=kind.four_bits,
    )


def _offer_request(asked: PlanRequest, work: Work) -> PlanRequest:
    """Return the plan request of an offer; a strategy that 4-bit weights rule out is left open."""
    wished = dataclasses.replace(asked, work=work, cpu_offload=False)
    if work.load_in_4bit and asked.strategy == "fsdp":
        return dataclasses.replace(wished, strategy=None, sharding=None, shard_size=None)
    return wished


def _forecast_offer(
    kind: _Kind,
    wished: PlanRequest,
    asked: PlanRequest,
    look: Look,
    *,
    rates: Rates,
    simulate: bool,
) -> Offer | None:
    simple = [one for one in search_order(wished) if _is_simple(one, wished)]
    ways = [one for one in simple if too_large_by_formula(one, wished) is None]
    explored = explore_candidates(wished, look, rates=rates, ways=ways)
    if explored.refused is not None:
        forecast_by_formula(wished, explored, ways)
    elif simulate and caches_memory(wished.hardware):
        simulate_preferred(wished, explored)
    best = _best_forecast(explored)
    if best is None:
        return None
    model = explored.model
    return Offer(
        name=kind.name,
        rank=wished.work.lora_rank or RANK,
        forecast=best,
        settings=_changed_settings(wished.work, asked),
        trained_count=None if model is None else model.trained_count,
        parameter_count=None if model is None else model.parameter_count,
        asked=wished,
    )


def _is_simple(one: Candidate, wished: PlanRequest) -> bool:
    hardware = wished.hardware
    over_all = one.layout.ranks == hardware.cards
    if one.cpu_offload or not over_all:
        return False
    return one.strategy != "fsdp" or (one.reshard and one.layout.copies == 1)


def _best_forecast(explored: Explored) -> Forecast | None:
    """Return the preferred forecast that fits, else the one that lacks the least memory."""
    fitting = [one for one in explored.forecasts if one.fits]
    if fitting:
        return decide.preferred(fitting)
    return max(explored.forecasts, key=lambda one: one.spare_bytes, default=None)


def _changed_settings(work: Work, asked: PlanRequest) -> dict[str, str]:
    """Return the settings that differ from the request, by their paths, as text."""
    changed: dict[str, str] = {}
    if asked.work.lora_rank is None:
        changed["model.lora_rank"] = str(work.lora_rank)
    if work.torch_dtype != asked.work.torch_dtype:
        changed["model.torch_dtype"] = str(work.torch_dtype)
    if work.load_in_4bit:
        changed["model.load_in_4bit"] = "true"
        if asked.strategy == "fsdp":
            changed["distributed.strategy"] = "auto"
    return changed
