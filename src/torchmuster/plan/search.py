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
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes, plural

Trace: TypeAlias = Callable[[TraceRequest], TraceRecord]  # or Impossible: it cannot be traced
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # the simplest first
STRATEGIES = ("single", "ddp", "fsdp")  # the simplest first
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
    """The forecasts so far."""

    request: PlanRequest
    trace: Trace
    model: TraceRecord  # its parameters, without steps
    forecasts: list[Forecast] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # the reasons, by candidate
    refused: list[Impossible] = field(default_factory=list)  # of candidates without a trace

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Forecast the candidates in order, until the simpler ones fit.

        One whose trace is refused is left out. Raises the refusal if all of them are.
        """
        for candidate in candidates:
            if self._is_needed(candidate) and self._may_fit(candidate):
                self._forecast_sizes(candidate)
        if self.refused and not self.forecasts:
            raise self.refused[0]

    def _is_needed(self, candidate: Candidate) -> bool:
        """Return whether no simpler candidate makes this one unnecessary."""
        if candidate.recompute == "selective" and self.model.blocks < 2:
            return False  # there are no blocks to recompute
        if candidate.cpu_offload:
            on_device = [row for row in self.forecasts if not row.candidate.cpu_offload]
            if any(forecast.probably_fits for forecast in on_device):
                return False
        fitting = [forecast for forecast in self.forecasts if forecast.fits]
        if any(forecast.candidate.recompute != candidate.recompute for forecast in fitting):
            return False  # it fits with less recomputation
        copies = [forecast for forecast in fitting if forecast.candidate.strategy == "ddp"]
        if candidate.strategy != "fsdp" or not copies:
            return True
        fastest = max(copies, key=lambda forecast: forecast.samples_per_s)
        return fastest.time is not None and fastest.time.waiting_share > _WORTH_SHARDING

    def _may_fit(self, candidate: Candidate) -> bool:
        """Return whether the states alone fit, which needs no trace; note it if they do not."""
        card = self.request.hardware.card
        least = estimate.states_bytes(self.model, candidate)
        if least <= card.memory_bytes:
            return True
        self.skipped[candidate.name] = (
            f"its states alone need {format_bytes(least)}, and a {card.noun} has "
            f"{format_bytes(card.memory_bytes)}"
        )
        return False

    def _forecast_sizes(self, candidate: Candidate) -> None:
        """Forecast a candidate with larger and larger micro-batches, as long as they fit."""
        for sized in batch_splits(candidate, self.request):
            try:
                forecast = self._forecast(sized)
            except Impossible as error:
                self.skipped[candidate.name] = error.what
                self.refused.append(error)
                return
            self.forecasts.append(forecast)
            by_category = forecast.memory.by_category
            samples = by_category["activations"] + by_category["logits"]
            if not forecast.fits or forecast.spare_bytes <= samples * _SAMPLES_SHARE:
                return

    def _forecast(self, candidate: Candidate) -> Forecast:
        request, hardware = self.request, self.request.hardware
        wanted = estimate.trace_requests(request.work, candidate, kernels=request.kernels)
        records = [self.trace(needed) for needed in wanted]
        memory = estimate.predict_memory(records, candidate, hardware=hardware)
        host_bytes = hardware.host_memory_bytes or memory.host_bytes
        return Forecast(
            candidate=candidate,
            memory=memory,
            time=estimate.predict_time(records, candidate, hardware=hardware),
            spare_bytes=hardware.card.memory_bytes - memory.high_bytes,
            host_spare_bytes=host_bytes - memory.host_bytes,
        )


# ---- the ladder


def ladder(request: PlanRequest) -> list[Candidate]:
    """Return the candidates from simple to complex, with the smallest micro-batch."""
    spreads = [spread for spread in _spreads(request) if _is_requested(spread, request)]
    if not spreads:
        names = ("strategy", "sharding", "cpu_offload")
        fixed = [f"{name} {getattr(request, name)}" for name in names if getattr(request, name)]
        why = f"the request sets {', '.join(fixed)}"
        if request.work.load_in_4bit:
            why += "; 4-bit weights are planned without fsdp"
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
    """Yield how the model may be spread over all GPUs, the simplest first.

    Hybrid has copies on machines, so that its gathers stay within a machine.
    """
    hardware, precision = request.hardware, request.precision.value
    ranks, here = hardware.cards, hardware.cards_per_machine
    if ranks == 1 or request.strategy == "single":
        yield Candidate(strategy="single", layout=_ALONE, precision=precision)
    else:
        copies = ShardLayout(copies=ranks, shards=1)
        yield Candidate(strategy="ddp", layout=copies, precision=precision)
    layouts = [ShardLayout(copies=1, shards=ranks)]
    if 1 < here < ranks:
        layouts.insert(0, ShardLayout(copies=hardware.machines, shards=here))
    for offload in (False, True):
        for layout in layouts:
            if ranks > 1 or request.strategy == "fsdp" or offload:
                yield Candidate(
                    strategy="fsdp",
                    layout=layout,
                    precision=precision,
                    cpu_offload=offload,
                    reshard=request.sharding != "shard_grad_op",
                )


def _is_requested(spread: Candidate, request: PlanRequest) -> bool:
    is_sharded, is_hybrid = spread.strategy == "fsdp", spread.layout.copies > 1
    kind = request.sharding
    if kind is not None and (not is_sharded or is_hybrid != (kind == "hybrid_shard")):
        return False
    return (
        not (request.work.load_in_4bit and is_sharded)
        and request.strategy in (None, spread.strategy)
        and request.cpu_offload in (None, spread.cpu_offload)
    )


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
    table = best_of_each(search.forecasts)
    offers: list[Offer] = []
    if not table or not table[0].probably_fits or table[0].candidate.cpu_offload:
        offers += _offers(request, trace)
    if not table or not table[0].probably_fits:
        raise _refusal(search, table, offers)
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
        findings=() if best.fits else (_tight(best, card.noun),),
        parameter_count=search.model.parameter_count,
    )


def _searched(request: PlanRequest, trace: Trace) -> Search:
    candidates = ladder(request)
    plain = replace(candidates[0], strategy="single", layout=_ALONE, cpu_offload=False)
    parameters = TraceRequest(
        work=request.work, candidate=plain, blocks=3, kernels=request.kernels, steps=False
    )
    search = Search(request=request, trace=trace, model=trace(parameters))
    search.run(candidates)
    return search


def best_of_each(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the best micro-batch of each candidate: those that fit, then the nearest.

    Of those as fast as the fastest, one with a margin of memory is preferred, then the simplest.
    """
    usable = [forecast for forecast in forecasts if forecast.fits]
    usable = usable or [forecast for forecast in forecasts if forecast.probably_fits]
    fastest = max((forecast.samples_per_s for forecast in usable), default=0.0)
    best: dict[Candidate, Forecast] = {}
    for forecast in sorted(forecasts, key=lambda forecast: _preference(forecast, fastest)):
        spread = replace(forecast.candidate, micro_batch_size=1, accumulation=1)
        best.setdefault(spread, forecast)
    return list(best.values())


def _preference(forecast: Forecast, fastest: float) -> tuple[float | bool, ...]:
    """Return what to sort by; ``fastest`` is the largest number of samples per second."""
    candidate = forecast.candidate
    fit = (max(forecast.missing_bytes, 0), not forecast.fits)
    if forecast.samples_per_s < fastest / SAME_RATE:
        return *fit, True, -forecast.samples_per_s
    card_bytes = forecast.spare_bytes + forecast.memory.high_bytes
    return (
        *fit,
        False,
        forecast.spare_bytes < _MARGIN * card_bytes,
        candidate.cpu_offload,
        STRATEGIES.index(candidate.strategy),
        candidate.layout.copies == 1,  # hybrid keeps gathers within a machine
        candidate.recompute != "none",
        candidate.recompute == "full",
        candidate.accumulation,
        -forecast.samples_per_s,
        -candidate.micro_batch_size,
    )


def _tight(best: Forecast, noun: str) -> Finding:
    lacking = format_bytes(max(-best.spare_bytes, -best.host_spare_bytes))
    return Finding(
        name="tight",
        status=Status.WARNING,
        what=f"this may run out of memory: at the high end of the band a {noun} lacks {lacking}",
        fix="muster plan --find-batch-size on that hardware, or use more GPUs",
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
        if search.forecasts:
            yield Offer(
                name=name,
                forecast=best_of_each(search.forecasts)[0],
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
    if not four_bit:
        return replace(request, work=work, cpu_offload=False), settings
    if not work.load_in_4bit:
        settings["model.load_in_4bit"] = "true"
        work = replace(work, load_in_4bit=True)
    if request.strategy == "fsdp":
        settings["distributed.strategy"] = "auto"
        request = replace(request, strategy=None, sharding=None)
    return replace(request, work=work, cpu_offload=False), settings


def _refusal(search: Search, table: Sequence[Forecast], offers: Sequence[Offer]) -> Impossible:
    """Return the error for a request that does not fit: what is missing, and what would help."""
    request = search.request
    hardware, card = request.hardware, request.hardware.card
    hints = []
    if table:
        nearest = table[0]
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
