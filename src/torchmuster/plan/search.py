"""Search the candidates from simple to complex, choose one, and offer what needs less memory.

The search stops when a simple candidate fits: recomputation is tried only where its absence does
not fit, CPU offload only where nothing else does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.plan import estimate
from torchmuster.plan.answer import Answer, Forecast, Offer
from torchmuster.plan.job import Candidate, Recompute
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes, plural

Trace: TypeAlias = Callable[[Sequence[TraceRequest]], Sequence[TraceRecord | TraceRefused]]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # the simplest first
# Without a global batch size, a rank has at most the default of muster train: samples per step
# affect convergence, and the size of the dataset is unknown here.
USUAL_SIZES = (1, 2, 4, 8)
SAME_RATE = 1.05  # forecasts are no more accurate than that
_WORTH_SHARDING = 0.1  # share of a step of ddp that is spent waiting
_MARGIN = 0.05  # of a GPU's memory, above the band: preferred over 5 % of speed
_SAMPLES_SHARE = 0.8  # of the activations: the least that one more sample takes
_MOST_MACHINES = 1024
_LORA_RANK = 16
_ALONE = ShardLayout(copies=1, shards=1)


@dataclass(kw_only=True)
class Search:
    """The forecasts so far; each trace is requested once."""

    request: PlanRequest
    trace: Trace
    model: TraceRecord  # its parameters, without steps
    forecasts: list[Forecast] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # the reasons, by candidate
    traces: dict[TraceRequest, TraceRecord | TraceRefused] = field(default_factory=dict)

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Forecast the candidates in order, until the simpler ones fit."""
        for candidate in candidates:
            if not self._is_needed(candidate) or self._is_skipped(candidate):
                continue
            for sized in batch_splits(candidate, self.request):
                forecast = self._forecast(sized)
                if forecast is None:
                    break
                self.forecasts.append(forecast)
                if not _has_room_for_more(forecast):
                    break

    def _is_needed(self, candidate: Candidate) -> bool:
        """Return whether no simpler candidate makes this one unnecessary."""
        if candidate.cpu_offload:
            for forecast in self.forecasts:
                if forecast.probably_fits and not forecast.candidate.cpu_offload:
                    return False
        if candidate.recompute == "selective" and self.model.blocks < 2:
            return False  # there are no blocks to recompute
        copies = []
        for forecast in self.forecasts:
            if forecast.fits and forecast.candidate.recompute != candidate.recompute:
                return False  # it fits with less recomputation
            if forecast.fits and forecast.candidate.strategy == "ddp":
                copies.append(forecast)
        if candidate.strategy != "fsdp" or not copies:
            return True
        fastest = max(copies, key=lambda forecast: forecast.samples_per_s)
        return fastest.time is not None and fastest.time.waiting_share > _WORTH_SHARDING

    def _is_skipped(self, candidate: Candidate) -> bool:
        """Note why a candidate needs no trace; return False if it needs one."""
        card = self.request.hardware.card
        least = estimate.states_bytes(self.model, candidate)
        if least <= card.memory_bytes:
            return False
        self.skipped[candidate.name] = (
            f"its states alone need {format_bytes(least)}, and a {card.noun} has "
            f"{format_bytes(card.memory_bytes)}"
        )
        return True

    def _forecast(self, candidate: Candidate) -> Forecast | None:
        """Return the forecast of a candidate; None if it cannot be traced."""
        request, hardware = self.request, self.request.hardware
        wanted = estimate.trace_requests(request.work, candidate, kernels=request.kernels)
        missing = [trace for trace in wanted if trace not in self.traces]
        self.traces.update(zip(missing, self.trace(missing), strict=True))
        records = []
        for traced in (self.traces[trace] for trace in wanted):
            if isinstance(traced, TraceRefused):
                if not self.forecasts:
                    raise Impossible(traced.what, why=traced.why, fix=traced.fix)
                self.skipped[candidate.name] = traced.what
                return None
            records.append(traced)
        memory = estimate.predict_memory(records, candidate, hardware=hardware)
        host_bytes = hardware.host_memory_bytes or memory.host_bytes
        return Forecast(
            candidate=candidate,
            memory=memory,
            time=estimate.predict_time(records, candidate, hardware=hardware),
            spare_bytes=hardware.card.memory_bytes - memory.high_bytes,
            host_spare_bytes=host_bytes - memory.host_bytes,
        )

    @property
    def table(self) -> list[Forecast]:
        """The best micro-batch of each candidate: those that fit, then the nearest."""
        fitting = [forecast for forecast in self.forecasts if forecast.fits]
        probable = [row for row in self.forecasts if row.probably_fits and not row.fits]
        missing = [forecast for forecast in self.forecasts if not forecast.probably_fits]
        missing.sort(key=lambda forecast: forecast.missing_bytes)
        table: dict[Candidate, Forecast] = {}
        for forecast in (*in_preference(fitting), *in_preference(probable), *missing):
            spread = replace(forecast.candidate, micro_batch_size=1, accumulation=1)
            table.setdefault(spread, forecast)
        return list(table.values())


def _has_room_for_more(forecast: Forecast) -> bool:
    """Return whether a larger micro-batch could fit, judged by what its samples take."""
    by_category = forecast.memory.by_category
    samples = by_category["activations"] + by_category["logits"]
    return forecast.fits and forecast.spare_bytes > samples * _SAMPLES_SHARE


# ---- the ladder


def ladder(request: PlanRequest) -> list[Candidate]:
    """Return the candidates from simple to complex, with the smallest micro-batch."""
    spreads = [spread for spread in _spreads(request) if _is_requested(spread, request)]
    if not spreads:
        names = ("strategy", "sharding", "shard_size", "cpu_offload")
        fixed = [f"{name} {getattr(request, name)}" for name in names if getattr(request, name)]
        why = f"the request sets {', '.join(fixed)}"
        if request.work.load_in_4bit:
            why += "; FSDP cannot shard 4-bit weights"
        cards = plural(request.hardware.cards, request.hardware.card.noun)
        raise Impossible(
            f"no strategy for {cards} meets the request",
            why=why,
            fix="leave one of these settings out",
        )
    modes = RECOMPUTE if request.recompute is None else (request.recompute,)
    candidates = []
    for mode in modes:
        candidates += [replace(spread, recompute=mode) for spread in spreads]
    return sorted(candidates, key=lambda candidate: candidate.cpu_offload)


def _spreads(request: PlanRequest) -> Iterator[Candidate]:
    """Yield how the model may be spread over all GPUs, the simplest first."""
    precision, ranks = request.precision.value, request.hardware.cards
    if ranks == 1 or request.strategy == "single":
        yield Candidate(strategy="single", layout=_ALONE, precision=precision)
    else:
        copies = ShardLayout(copies=ranks, shards=1)
        yield Candidate(strategy="ddp", layout=copies, precision=precision)
    for offload in (False, True):
        for layout in _shard_layouts(request, ranks):
            if ranks > 1 or request.strategy == "fsdp" or offload:
                yield Candidate(
                    strategy="fsdp",
                    layout=layout,
                    precision=precision,
                    cpu_offload=offload,
                    reshard=request.sharding != "shard_grad_op",
                )


def _shard_layouts(request: PlanRequest, ranks: int) -> Iterator[ShardLayout]:
    """Yield copies over machines, whose gathers stay within a machine, then shards over all."""
    here, size = request.hardware.cards_per_machine, request.shard_size
    if size is not None:
        if ranks % size == 0 and (size > 1 or ranks == 1):
            yield ShardLayout(copies=ranks // size, shards=size)
        return
    shards = here
    while 1 < shards < ranks:
        if ranks % shards == 0:
            yield ShardLayout(copies=ranks // shards, shards=shards)
        shards *= 2
    yield ShardLayout(copies=1, shards=ranks)


def _is_requested(spread: Candidate, request: PlanRequest) -> bool:
    if request.work.load_in_4bit and spread.strategy == "fsdp":
        return False
    if request.strategy is not None and spread.strategy != request.strategy:
        return False
    if request.cpu_offload is not None and spread.cpu_offload != request.cpu_offload:
        return False
    is_hybrid = spread.layout.copies > 1
    if request.sharding == "hybrid_shard":
        return spread.strategy == "fsdp" and is_hybrid
    if request.sharding is not None or request.shard_size is not None:
        return spread.strategy == "fsdp" and (request.shard_size is not None or not is_hybrid)
    return True


def batch_splits(spread: Candidate, request: PlanRequest) -> Iterator[Candidate]:
    """Yield a candidate with every sensible micro-batch size, the smallest first."""
    fixed = request.micro_batch_size
    if request.global_batch_size is None:
        for size in (fixed,) if fixed else USUAL_SIZES:
            yield replace(spread, micro_batch_size=size)
        return
    share = math.ceil(request.global_batch_size / spread.layout.ranks)
    for size in range(1, share + 1):
        is_sensible = share % size == 0 or size & (size - 1) == 0
        if size == min(fixed, share) if fixed else is_sensible:
            yield replace(spread, micro_batch_size=size, accumulation=math.ceil(share / size))


# ---- the choice


def make_plan(request: PlanRequest, trace: Trace) -> Answer:
    """Return how to train; raise :class:`Impossible` with what would help if nothing fits."""
    search = _searched(request, trace)
    table = search.table
    offers: list[Offer] = []
    if not table or not table[0].probably_fits or table[0].candidate.cpu_offload:
        offers += _offers(request, trace)
    if not table or not table[0].probably_fits:
        raise _refusal(search, offers)
    best, card = table[0], request.hardware.card
    reason = (
        f"{best.candidate.describe(card.noun)}: {best.band_text} of "
        f"{format_bytes(card.memory_bytes)} per {card.noun}"
    )
    if "ddp" in search.skipped and best.candidate.strategy == "fsdp":
        reason += f"; ddp: {search.skipped['ddp']}"
    return Answer(
        request=request,
        chosen=Decision(value=best, reason=reason),
        table=tuple(table),
        skipped=search.skipped,
        offers=tuple(offers),
        findings=tuple(_findings(best, search)),
        model=search.model,
        traces=len(search.traces),
    )


def _searched(request: PlanRequest, trace: Trace) -> Search:
    candidates = ladder(request)
    plain = replace(candidates[0], strategy="single", layout=_ALONE, cpu_offload=False)
    (model,) = trace([TraceRequest(
        work=request.work, candidate=plain, blocks=3, kernels=request.kernels, steps=False
    )])  # fmt: skip
    if isinstance(model, TraceRefused):
        raise Impossible(model.what, why=model.why, fix=model.fix)
    search = Search(request=request, trace=trace, model=model)
    search.run(candidates)
    return search


def in_preference(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Order forecasts: of those as fast as the fastest, with a margin of memory, then the simplest.

    The fastest of the rest follow likewise.
    """
    remaining = sorted(forecasts, key=lambda forecast: -forecast.samples_per_s)
    ordered: list[Forecast] = []
    while remaining:
        least = remaining[0].samples_per_s / SAME_RATE
        equal = [forecast for forecast in remaining if forecast.samples_per_s >= least]
        ordered += sorted(equal, key=_preference)
        remaining = remaining[len(equal) :]
    return ordered


def _preference(forecast: Forecast) -> tuple[object, ...]:
    candidate = forecast.candidate
    card_bytes = forecast.spare_bytes + forecast.memory.high_bytes
    return (
        forecast.spare_bytes < _MARGIN * card_bytes,
        candidate.cpu_offload,
        ("single", "ddp", "fsdp").index(candidate.strategy),
        candidate.layout.copies == 1,  # hybrid keeps gathers within a machine
        candidate.recompute != "none",
        candidate.recompute == "full",
        candidate.accumulation,
        -forecast.samples_per_s,
        -candidate.micro_batch_size,
    )


def _findings(best: Forecast, search: Search) -> Iterator[Finding]:
    request, noun = search.request, search.request.hardware.card.noun
    if not best.fits:
        lacking = max(-best.spare_bytes, -best.host_spare_bytes)
        yield Finding(
            name="tight",
            status=Status.WARNING,
            what=f"this may run out of memory: at the high end of the band a {noun} lacks "
            f"{format_bytes(lacking)}",
            fix="muster plan --find-batch-size on that hardware, or use more GPUs",
        )
    for warning in search.model.warnings:
        yield Finding(
            name="cpu-kernel",
            status=Status.WARNING,
            what=warning,
            fix="call it as torch.nn.functional does, or measure: muster plan --find-batch-size",
        )
    batch, wanted = best.candidate.global_batch_size, request.global_batch_size
    if wanted is None:
        yield Finding(
            name="batch-left-open",
            status=Status.NOTE,
            what=f"a step has {batch:,} samples, as no global batch size was requested",
            fix="--global-batch-size N: samples per step affect convergence",
        )
    elif wanted != batch:
        yield Finding(
            name="uneven-batch",
            status=Status.NOTE,
            what=f"a global batch of {wanted} does not divide evenly among "
            f"{best.candidate.layout.ranks} ranks: some ranks wait",
            fix=f"--global-batch-size {batch}",
        )


# ---- what needs less memory


def _offers(request: PlanRequest, trace: Trace) -> Iterator[Offer]:
    """Yield LoRA and QLoRA with their forecasts: they change what is trained, so none is chosen."""
    if request.work.model_name_or_path is None:
        return
    for name in ("LoRA", "QLoRA"):
        adapted, settings = _adapted(request, four_bit=name == "QLoRA")
        if not settings or (request.work.load_in_4bit and name == "LoRA"):
            continue
        try:
            search = _searched(adapted, trace)
        except Impossible:  # peft or bitsandbytes is missing, or cannot adapt this model
            continue
        if search.table:
            yield Offer(
                name=name,
                forecast=search.table[0],
                settings=settings,
                trained_count=search.model.trained_count,
            )


def _adapted(request: PlanRequest, *, four_bit: bool) -> tuple[PlanRequest, dict[str, str]]:
    """Return the request with LoRA, and the settings that change; none if it has them already."""
    settings: dict[str, str] = {}
    work = request.work
    if work.lora is None:
        settings["model.lora"] = f"{{r: {_LORA_RANK}}}"
        work = replace(work, lora={"r": _LORA_RANK})
    if work.torch_dtype in (None, "float32") and request.precision.value != "fp32":
        # Frozen weights lose nothing in 16 bits.
        dtype = estimate.COMPUTE_TYPES[request.precision.value]
        settings["model.torch_dtype"] = dtype
        work = replace(work, torch_dtype=dtype)
    if four_bit and not work.load_in_4bit:
        settings["model.load_in_4bit"] = "true"
        work = replace(work, load_in_4bit=True)
    adapted = replace(request, work=work, cpu_offload=False)
    if four_bit and request.strategy == "fsdp":
        settings["distributed.strategy"] = "auto"
        adapted = replace(adapted, strategy=None, sharding=None, shard_size=None)
    return adapted, settings


def _refusal(search: Search, offers: Sequence[Offer]) -> Impossible:
    """Return the error for a request that does not fit: what is missing, and what would help."""
    request = search.request
    hardware, card = request.hardware, request.hardware.card
    hints = []
    if search.table:
        nearest = search.table[0]
        why = (
            f"the nearest, {nearest.candidate.describe(card.noun)}, needs {nearest.band_text}: "
            f"{format_bytes(nearest.missing_bytes)} too much"
        )
        machines = _machines_needed(nearest, search)
        if machines is not None:
            each = hardware.cards_per_machine
            hints.append(
                f"about {machines * each} x {card.name} (--hardware {machines}x{each}x{card.name})"
            )
    else:
        # The last candidate spreads the states most.
        why = ": ".join(list(search.skipped.items())[-1])
    if request.micro_batch_size not in (None, 1):
        hints.append("a smaller train.micro_batch_size")
    if request.recompute == "none":
        hints.append("--set train.activation_checkpointing=full")
    for offer in offers:
        if offer.forecast.probably_fits:
            hints.append(f"{offer.describe(card.noun)}: {offer.flags}")
    return Impossible(
        f"this training does not fit on {plural(hardware.cards, card.noun)} with "
        f"{format_bytes(card.memory_bytes)} each",
        why=why,
        fix="; or ".join(hints) or "use GPUs with more memory, or shorter samples",
    )


def _machines_needed(nearest: Forecast, search: Search) -> int | None:
    """Return how many machines fit, if the states of the nearest candidate are sharded further."""
    hardware, candidate = search.request.hardware, nearest.candidate
    if candidate.strategy == "single" or candidate.cpu_offload:
        return None
    states, _, _ = estimate.device_bytes(estimate.states_bytes(search.model, candidate), hardware)
    machines = hardware.machines
    while machines < _MOST_MACHINES:
        machines *= 2
        freed = states * (1 - candidate.layout.shards / machines / hardware.cards_per_machine)
        if nearest.missing_bytes <= freed:
            return machines
    return None
