"""Forecast the candidates one after the other, with as few traces as possible.

The first trace shows the model's parameters. From then on a candidate is evaluated only if its
states fit and it could be faster than the best so far. Candidates of one family share traces.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torchmuster.errors import Impossible
from torchmuster.plan.answer import Forecast, PassedOver, short_name
from torchmuster.plan.job import Candidate, Recompute
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.pruning import (
    SAME_RATE,
    by_formula,
    copies_wait,
    needs_more_than_states,
    needs_recompute,
    outgrows,
    rate_bound,
    too_large,
    too_large_by_formula,
    too_many_shards,
)
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing.rates import Rates
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import plural

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # the simplest first
# Without a global batch size, a rank has at most the default of muster train: samples per step
# affect convergence, and the size of the dataset is unknown here.
USUAL_MICRO_BATCH_SIZE = 8


def device_spreads(asked: PlanRequest) -> list[Candidate]:
    """Return the candidates to spread the model, the simplest first, with the smallest micro-batch.

    They use all GPUs, one machine or one GPU: more GPUs may be slower.
    """
    found = [one for one in _all_spreads(asked) if _is_asked_for(one, asked)]
    if asked.work.load_in_4bit:
        found = [one for one in found if one.strategy != "fsdp"]
    if not found and asked.work.load_in_4bit:
        raise Impossible(
            "a plan does not support model.load_in_4bit with fsdp",
            why=f"sharded 4-bit weights are not traced, and {_fixed(asked)}",
            fix="use distributed.strategy: ddp without settings of fsdp, or leave out "
            "model.load_in_4bit",
        )
    if not found:
        raise Impossible(
            "no strategy for "
            f"{plural(asked.hardware.cards, asked.hardware.card.noun)} meets the request",
            why=_fixed(asked),
            fix="leave one of these settings out",
        )
    return found


def _all_spreads(asked: PlanRequest) -> Iterator[Candidate]:
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


def _layouts(asked: PlanRequest, ranks: int) -> Iterator[ShardLayout]:
    """Yield shards over all ranks, and copies over whole machines; or the requested shard size."""
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


def _is_asked_for(one: Candidate, asked: PlanRequest) -> bool:
    if asked.strategy is not None and one.strategy != asked.strategy:
        return False
    # A named strategy means all GPUs; on a CPU the number of ranks is as requested.
    all_of_them = asked.strategy in ("ddp", "fsdp") or asked.hardware.card.kind == "cpu"
    if all_of_them and one.layout.ranks != asked.hardware.cards:
        return False
    if asked.cpu_offload is not None and one.cpu_offload != asked.cpu_offload:
        return False
    if asked.shard_size is not None and one.layout.shards != asked.shard_size:
        return False
    return asked.sharding is None or _candidates_kind(one) == asked.sharding


def _candidates_kind(one: Candidate) -> str:
    if one.strategy != "fsdp":
        return ""
    if one.layout.copies > 1:
        return "hybrid_shard"
    return "full_shard" if one.reshard else "shard_grad_op"


def _fixed(asked: PlanRequest) -> str:
    names = ("strategy", "sharding", "shard_size", "cpu_offload")
    given = {name: getattr(asked, name) for name in names}
    return "the request sets " + ", ".join(
        f"{name} {value}" for name, value in given.items() if value is not None
    )


def recompute_modes(asked: PlanRequest) -> tuple[Recompute, ...]:
    """Return how activations may be kept, the simplest first."""
    return RECOMPUTE if asked.recompute is None else (asked.recompute,)


def batch_splits(spread: Candidate, asked: PlanRequest) -> Iterator[Candidate]:
    """Yield a candidate with every sensible micro-batch size, the smallest first."""
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


Look: TypeAlias = Callable[[Sequence[TraceRequest]], Sequence[TraceRecord | TraceRefused]]
# A search that found a fit stops after this many traces: more take long and rarely change it.
_ENOUGH_TRACES = 20
_AT_ONCE = 2  # number of tracing processes
_TRACED_ACCUMULATION = 2  # more micro-batches are computed
_NO_GAIN = 1.001  # a micro-batch with a smaller speed-up is not worth its memory


class Traces:
    """Records by candidate; each trace is requested once."""

    def __init__(self, asked: PlanRequest, look: Look) -> None:
        self._asked = asked
        self._look = look
        self._found: dict[TraceRequest, TraceRecord | TraceRefused] = {}
        self._considered: set[TraceRequest] = set()  # needed for all micro-batch sizes

    def first(self, candidate: Candidate) -> TraceRecord | TraceRefused:
        """Return one record that shows the model; related ones are traced at the same time."""
        return self._of(self._needed(candidate)[:_AT_ONCE])[0]

    def of(
        self, candidate: Candidate, *, with_log: bool = False
    ) -> list[TraceRecord] | TraceRefused:
        """Return the records to forecast a candidate from, or why it cannot be traced.

        ``with_log``: with every allocation, to simulate PyTorch's allocator.
        """
        self._considered.update(self._requests(candidate))
        wanted = self._requests(candidate, with_log=True) if with_log else self._needed(candidate)
        found = self._of(wanted)
        records = [one for one in found if isinstance(one, TraceRecord)]
        if len(records) == len(found):
            more = self._of(memory.further_requests(records))
            records += [one for one in more if isinstance(one, TraceRecord)]
            found += more
        refused = next((one for one in found if isinstance(one, TraceRefused)), None)
        return records if refused is None else refused

    @property
    def count(self) -> int:
        """The number of traces so far, including those saved by sharing."""
        return len(self._found.keys() | self._considered)

    def missing(self, candidate: Candidate) -> bool:
        """Return whether a candidate needs traces that were not requested yet."""
        return any(one not in self._found for one in self._needed(candidate))

    def _needed(self, candidate: Candidate) -> list[TraceRequest]:
        """Return the requests; one micro-batch size is enough if it is the candidate's own."""
        wanted = self._requests(candidate)
        if candidate.accumulation > _TRACED_ACCUMULATION:
            return wanted  # two sizes show the memory of waiting inputs
        least = min(one.candidate.micro_batch_size for one in wanted)
        if candidate.micro_batch_size != least:
            return wanted
        return [one for one in wanted if one.candidate.micro_batch_size == least]

    def _requests(self, candidate: Candidate, *, with_log: bool = False) -> list[TraceRequest]:
        asked = self._asked
        return memory.trace_requests(
            asked.work, candidate, kernels=asked.kernels, keep_log=with_log
        )

    def _of(self, wanted: Sequence[TraceRequest]) -> list[TraceRecord | TraceRefused]:
        missing = [one for one in wanted if one not in self._found]
        if missing:
            self._found.update(zip(missing, self._look(missing), strict=True))
        return [self._found[one] for one in wanted]


@dataclass(kw_only=True)
class Explored:
    """The results of the search so far."""

    traces: Traces
    model: TraceRecord | None = None  # of the first trace
    refused: TraceRefused | None = None  # why the first trace could not be made
    forecasts: list[Forecast] = field(default_factory=list)
    passed_over: list[PassedOver] = field(default_factory=list)
    doubts: list[Impossible] = field(default_factory=list)  # traces that disagree with others

    @property
    def best(self) -> Forecast | None:
        """The fastest forecast that fits."""
        fitting = (one for one in self.forecasts if one.fits)
        return max(fitting, key=lambda one: one.samples_per_s or 0.0, default=None)

    def pass_over(self, one: PassedOver) -> None:
        """Record a skipped candidate, once."""
        if one not in self.passed_over:
            self.passed_over.append(one)


def explore_candidates(
    asked: PlanRequest, look: Look, *, rates: Rates, ways: Sequence[Candidate] | None = None
) -> Explored:
    """Forecast the candidates that could be chosen; ``ways`` are those to consider."""
    explored = Explored(traces=Traces(asked, look))
    ways = search_order(asked) if ways is None else ways
    if not ways:
        return explored
    shown = explored.traces.first(scout(ways, asked))
    if isinstance(shown, TraceRefused):
        explored.refused = shown
        return explored
    explored.model = shown
    for way in ways:
        if not _is_worth_a_look(way, asked, explored, shown):
            continue
        try:
            explored.forecasts += forecast_portions(way, explored.traces, asked, rates=rates)
        except CannotBeTraced as error:
            explored.pass_over(PassedOver(name=short_name(way), why=error.refused.what))
    return explored


def forecast_by_formula(asked: PlanRequest, explored: Explored, ways: Sequence[Candidate]) -> None:
    """Estimate a model that cannot be traced, with a wide band and no time."""
    for way in ways:
        for candidate in batch_splits(way, asked):
            needed = by_formula(candidate, asked)
            if needed is None:
                return
            one = as_forecast(candidate, needed, asked)
            explored.forecasts.append(one)
            if not one.fits:
                break


def search_order(asked: PlanRequest) -> list[Candidate]:
    """Return the candidates in search order: likely fast ones first."""
    kinds = recompute_modes(asked)
    ways = [
        dataclasses.replace(spread, recompute=kind)
        for kind in kinds
        for spread in device_spreads(asked)
    ]
    return sorted(
        ways,
        key=lambda one: (
            one.cpu_offload,
            not one.reshard,
            # Over several machines hybrid sharding comes first: its gathers stay within a machine.
            one.strategy == "fsdp" and one.layout.copies == 1 and asked.hardware.machines > 1,
            kinds.index(one.recompute),
            -one.layout.ranks,
            one.strategy == "fsdp",
            one.layout.shards,
        ),
    )


def scout(ways: Sequence[Candidate], asked: PlanRequest) -> Candidate:
    """Return the candidate to trace first: the first that fits, or could fit, by a formula.

    Without a formula a sharded one: those are evaluated for models of every size.
    """
    estimates = [(one, by_formula(one, asked)) for one in ways]
    card_bytes = asked.hardware.card.memory_bytes
    for one, needed in estimates:
        if needed is not None and needed.total_bytes <= card_bytes and not one.cpu_offload:
            return one
    sharded = [one for one in ways if one.strategy == "fsdp" and one.reshard] or list(ways)
    return next((one for one in sharded if not too_large_by_formula(one, asked)), sharded[0])


def _is_worth_a_look(
    way: Candidate, asked: PlanRequest, explored: Explored, model: TraceRecord
) -> bool:
    best = explored.best
    if way.cpu_offload and best is not None and not best.candidate.cpu_offload:
        return False  # never as fast: only for what does not fit otherwise
    if why := too_large(way, asked, model):
        explored.pass_over(why)
        return False
    if asked.strategy is None and (why := too_many_shards(way, model)):
        explored.pass_over(why)
        return False
    if way.recompute != "none" and model.blocks < 2:
        return False  # there are no blocks to recompute
    if why := too_large_by_formula(way, asked):
        explored.pass_over(why)
        return False
    if best is None:
        return not way.cpu_offload or _is_kept_by_states(way, explored, model)
    if way.recompute != "none" and not needs_recompute(explored.forecasts, way, asked):
        return False
    if way.strategy == "fsdp" and not copies_wait(best):
        return False
    if not _can_win(way, best, explored):
        return False
    if explored.traces.count >= _ENOUGH_TRACES and explored.traces.missing(way):
        explored.pass_over(
            PassedOver(
                name=short_name(way),
                why=f"not traced: a configuration fits after {_ENOUGH_TRACES} traces",
            )
        )
        return False
    return True


def _is_kept_by_states(way: Candidate, explored: Explored, model: TraceRecord) -> bool:
    """Return whether CPU offload could make a candidate fit, judged by forecasts without it."""
    alike = [
        one
        for one in explored.forecasts
        if one.candidate.recompute == way.recompute and not one.candidate.cpu_offload
    ]
    return not alike or not all(needs_more_than_states(one, model) for one in alike)


def _can_win(way: Candidate, best: Forecast, explored: Explored) -> bool:
    """Return whether a candidate could be faster than the best, or as fast and simpler."""
    bound = rate_bound(explored.forecasts, way)
    if bound is None or not best.samples_per_s:
        return True
    if bound > best.samples_per_s * SAME_RATE:
        return True
    is_simpler = simplicity(way) < simplicity(best.candidate)
    return is_simpler and bound * SAME_RATE > best.samples_per_s


class CannotBeTraced(Exception):
    """A candidate that cannot be traced, although others can."""

    def __init__(self, refused: TraceRefused) -> None:
        super().__init__(refused.what)
        self.refused = refused


def forecast_portions(
    way: Candidate, traces: Traces, asked: PlanRequest, *, rates: Rates
) -> Iterator[Forecast]:
    """Yield forecasts with growing micro-batches, up to the first that does not fit."""
    previous, last = 0.0, None
    for candidate in batch_splits(way, asked):
        if (
            last is not None
            and traces.missing(candidate)
            and outgrows(last, candidate.micro_batch_size)
        ):
            return  # no trace is needed to see that
        one = forecast_candidate(candidate, traces, asked, rates=rates)
        yield one
        last = one
        if not one.could_fit:
            return
        rate = one.samples_per_s or 0.0
        if one.time is not None and asked.global_batch_size is None and rate <= previous * _NO_GAIN:
            return
        previous = max(rate, previous)


def forecast_candidate(
    candidate: Candidate, traces: Traces, asked: PlanRequest, *, rates: Rates
) -> Forecast:
    """Return the forecast of one candidate."""
    records = traces.of(candidate)
    if isinstance(records, TraceRefused):
        raise CannotBeTraced(records)
    hardware = asked.hardware
    needed = memory.predict_memory(records, candidate, hardware=hardware)
    try:
        time = timing.predict_time(records, candidate, hardware=hardware, rates=rates)
    except Impossible:  # the rates of this GPU are unknown
        return as_forecast(candidate, needed, asked)
    share = (asked.global_batch_size or candidate.global_batch_size) / candidate.global_batch_size
    return as_forecast(
        candidate, needed, asked, time=time, samples_per_s=share * time.samples_per_s
    )


def as_forecast(
    candidate: Candidate,
    needed: memory.Memory,
    asked: PlanRequest,
    *,
    time: timing.StepTime | None = None,
    samples_per_s: float | None = None,
) -> Forecast:
    """Compare what a candidate needs with what the hardware has."""
    host = asked.hardware.host_memory_bytes
    return Forecast(
        candidate=candidate,
        memory=needed,
        time=time,
        spare_bytes=asked.hardware.card.memory_bytes - needed.high_bytes,
        host_spare_bytes=None if host is None else host - needed.host_bytes,
        samples_per_s=samples_per_s,
    )


def simplicity(one: Candidate) -> tuple[float, ...]:
    """Return a sort key, the simplest candidate first: fewer features, smaller micro-batches."""
    strategies = ("single", "ddp", "fsdp")
    recompute = {"none": 0.0, "selective": 2.0, "full": 3.0}
    how = one.recompute
    return (
        float(one.cpu_offload),
        float(strategies.index(one.strategy)),
        float(not one.reshard),
        float(one.layout.copies > 1) if one.strategy == "fsdp" else 0.0,
        1.0 if isinstance(how, int) else recompute[how],
        float(one.micro_batch_size),
    )
