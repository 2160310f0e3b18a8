"""Make a plan: search, choose and give the reason; or refuse, and report what would help."""

import dataclasses
import math
import time
from collections.abc import Iterator

from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.plan.answer import Answer, Forecast, Offer
from torchmuster.plan.memory import shard_degree
from torchmuster.plan.memory.forecast import caches_memory
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search import decide, offers, refusal
from torchmuster.plan.search.candidates import (
    USUAL_MICRO_BATCH_SIZE,
    Explored,
    Look,
    explore_candidates,
    forecast_by_formula,
    search_order,
)
from torchmuster.plan.search.simulated import simulate_preferred
from torchmuster.plan.timing import forecast
from torchmuster.plan.timing.rates import Rates
from torchmuster.units import format_bytes


def make_plan(asked: PlanRequest, look: Look, *, rates: Rates, simulate: bool = True) -> Answer:
    """Return how to train; raise :class:`Impossible` with what would help if nothing fits.

    ``simulate``: simulate PyTorch's allocator for the preferred candidates, instead of assuming a
    typical share.
    """
    begun = time.monotonic()
    explored = explore_candidates(asked, look, rates=rates)
    if explored.refused is not None:
        forecast_by_formula(asked, explored, search_order(asked))
        if not explored.forecasts:
            refused = explored.refused
            raise Impossible(refused.what, why=refused.why, fix=refused.fix)
    elif simulate and caches_memory(asked.hardware):
        simulate_preferred(asked, explored)
    if explored.best is None:
        raise refusal.refusal(asked, explored, look, rates=rates, simulate=simulate)
    chosen, runner_up = decide.choose_candidate(explored, asked)
    best = chosen.value
    others: list[Offer] = []
    if offers.are_needed(asked, best):
        others += offers.make_offers(asked, look, rates=rates, simulate=simulate)
    model = explored.model
    return Answer(
        asked=asked,
        chosen=chosen,
        runner_up=runner_up,
        table=decide.candidates_table(explored.forecasts),
        passed_over=tuple(explored.passed_over),
        would_change=tuple(decide.would_change(best, explored, asked, rates=rates)),
        offers=tuple(others),
        findings=tuple(_planning_findings(best, asked, explored)),
        parameter_count=None if model is None else model.parameter_count,
        tokens_per_sample=None if model is None else model.tokens_per_sample,
        sources=tuple(_sources(best, asked)),
        took_s=time.monotonic() - begun,
    )


def cost_of(one: Forecast, asked: PlanRequest) -> forecast.CostForecast | None:
    """Return hours and cost of the whole run; None if its length or speed is unknown."""
    if asked.tokens is None or one.time is None:
        return None
    # A candidate may use only some of the GPUs; unused ones cost nothing.
    machines = math.ceil(one.candidate.layout.ranks / asked.hardware.cards_per_machine)
    on_each = min(one.candidate.layout.ranks, asked.hardware.cards_per_machine)
    used = dataclasses.replace(asked.hardware, machines=machines, cards_per_machine=on_each)
    return forecast.forecast_cost(one.time, used, tokens=asked.tokens)


def _planning_findings(best: Forecast, asked: PlanRequest, explored: Explored) -> Iterator[Finding]:
    if explored.refused is not None:
        yield Finding(
            name="not-traced",
            status=Status.WARNING,
            what="this model cannot be traced: memory is estimated by a formula, and time is unknown",
            why=explored.refused.what,
            fix=explored.refused.fix,
        )
    elif best.time is None:
        yield Finding(
            name="not-timed",
            status=Status.NOTE,
            what=f"no times are forecast: the rates of {asked.hardware.card.name} are unknown",
            why="a forecast needs the rate of matrix products and the memory bandwidth",
            fix="write them into a cluster file, or run muster plan --calibrate on that machine",
        )
    for doubt in explored.doubts[:1]:
        yield Finding(
            name="not-a-line", status=Status.WARNING, what=doubt.what, why=doubt.why, fix=doubt.fix
        )
    if explored.model is not None and best.candidate.strategy == "fsdp":
        yield from shard_degree.degree_findings(explored.model, shards=best.candidate.layout.shards)
    yield from _of_portions(best, asked)
    yield from _of_saving(best, asked)


def _of_portions(best: Forecast, asked: PlanRequest) -> Iterator[Finding]:
    wanted, given = asked.global_batch_size, best.candidate.global_batch_size
    is_open = asked.micro_batch_size is None
    if wanted is None:
        yield Finding(
            name="batch-left-open",
            status=Status.NOTE,
            what=f"a step has {given:,} samples, as no global batch size was given"
            + (f"; at most {USUAL_MICRO_BATCH_SIZE} per rank" if is_open else ""),
            fix="--set train.global_batch_size=N: samples per step affect convergence",
        )
    elif wanted != given:
        yield Finding(
            name="uneven-portions",
            status=Status.NOTE,
            what=f"a global batch of {wanted} samples does not divide evenly among "
            f"{best.candidate.layout.ranks} ranks: some ranks wait",
            fix=f"use a global batch size of {given}, which keeps all ranks busy",
        )


def _of_saving(best: Forecast, asked: PlanRequest) -> Iterator[Finding]:
    host = asked.hardware.host_memory_bytes
    needed = best.memory.host_bytes + best.memory.save_host_bytes
    if host is not None and needed > host:
        yield Finding(
            name="save-waits",
            status=Status.NOTE,
            what="training stops while a checkpoint is saved",
            why=f"an async save needs {format_bytes(best.memory.save_host_bytes)} of host memory; "
            f"each machine has {format_bytes(host)}",
            fix="save less often, or add memory to the machines",
        )


def _sources(best: Forecast, asked: PlanRequest) -> Iterator[tuple[str, str]]:
    hardware = asked.hardware
    yield "memory", best.memory.origin
    if best.time is not None:
        yield "time", best.time.origin
    label = "CPU" if hardware.card.kind == "cpu" else "GPU"
    yield label, f"{hardware.card.name}: {hardware.card.source or 'unknown source'}"
    if hardware.cards_per_machine > 1 and hardware.within.source:
        yield "links within a machine", hardware.within.source
    if hardware.machines > 1 and hardware.between.source:
        yield "links between machines", hardware.between.source
    yield "precision", asked.precision.reason
    for sentence in hardware.assumed:
        yield "assumed", sentence
