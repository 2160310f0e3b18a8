"""Search the candidates from simple to complex, choose one, and offer what needs less memory.

The search stops when a simple candidate fits: recomputation is tried only where its absence does
not fit, CPU offload only where nothing else does.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.plan import estimate
from torchmuster.plan.answer import (
    Answer,
    Forecast,
    Offer,
    Skipped,
    candidate_name,
    recompute_of,
)
from torchmuster.plan.job import Candidate, Recompute, Work
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import format_bytes, plural

Look: TypeAlias = Callable[[Sequence[TraceRequest]], Sequence[TraceRecord | TraceRefused]]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # the simplest first
# Without a global batch size, a rank has at most the default of muster train: samples per step
# affect convergence, and the size of the dataset is unknown here.
USUAL_MICRO_BATCH_SIZE = 8
SAME_RATE = 1.05  # forecasts are no more accurate than that
_WORTH_SHARDING = 0.1  # share of a step of ddp that is spent waiting
_MARGIN = 0.05  # of a GPU's memory, above the band: preferred over 5 % of speed
_MOST_GATHERED = 1.05  # of a block's own size, with padding rows
_MOST_MACHINES = 1024
_LORA_RANK = 16
_HALF = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(kw_only=True)
class Search:
    """The forecasts so far; each trace is requested once."""

    asked: PlanRequest
    look: Look
    forecasts: list[Forecast] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    model: TraceRecord | None = None  # the first trace
    traces: dict[TraceRequest, TraceRecord | TraceRefused] = field(default_factory=dict)

    def run(self, ladder: Sequence[Candidate]) -> None:
        """Forecast the candidates in order, until the simpler ones fit."""
        for candidate in ladder:
            if not self._is_needed(candidate):
                continue
            if self.model is not None and self._is_too_large(candidate, self.model):
                continue
            for sized in batch_splits(candidate, self.asked):
                forecast = self.forecast(sized)
                if forecast is None:
                    break
                self.forecasts.append(forecast)
                if not self._has_room_for_more(forecast):
                    break

    def _is_needed(self, candidate: Candidate) -> bool:
        """Return whether no simpler candidate makes this one unnecessary."""
        fitting = [forecast for forecast in self.forecasts if forecast.fits]
        if candidate.cpu_offload:
            on_device = [one for one in self.forecasts if not one.candidate.cpu_offload]
            if any(forecast.probably_fits for forecast in on_device):
                return False
        if any(forecast.candidate.recompute != candidate.recompute for forecast in fitting):
            return False  # it fits with less recomputation
        if candidate.recompute != "none" and self.model is not None and self.model.blocks < 2:
            return False  # there are no blocks to recompute
        copies = [forecast for forecast in fitting if forecast.candidate.strategy == "ddp"]
        if candidate.strategy == "fsdp" and copies:
            best = max(copies, key=lambda forecast: forecast.samples_per_s)
            return best.time is not None and best.time.waiting_share > _WORTH_SHARDING
        return True

    def _is_too_large(self, candidate: Candidate, model: TraceRecord) -> bool:
        card = self.asked.hardware.card
        least = estimate.states_bytes(model, candidate)
        if least > card.memory_bytes:
            why = (
                f"its states alone need {format_bytes(least)}, and a {card.noun} has "
                f"{format_bytes(card.memory_bytes)}"
            )
            self._skip(candidate_name(candidate), why, needs_bytes=least)
            return True
        shards = candidate.layout.shards
        share = estimate.gathered_share(model.parameters, shards)
        if self.asked.strategy is None and shards > 1 and share > _MOST_GATHERED:
            name = f"{candidate_name(candidate)} with {shards:,} shards"
            self._skip(name, f"fewer rows than shards: gathers send {share:.1f} times the model")
            return True
        return False

    def _skip(self, name: str, why: str, needs_bytes: int | None = None) -> None:
        skipped = Skipped(name=name, why=why, needs_bytes=needs_bytes)
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    def _has_room_for_more(self, forecast: Forecast) -> bool:
        """Return whether a larger micro-batch could fit, judged by what its samples take."""
        if not forecast.fits:
            return False
        by_category = forecast.memory.by_category
        samples = by_category["activations"] + by_category["logits"]
        return forecast.spare_bytes > samples * 0.8

    def forecast(self, candidate: Candidate) -> Forecast | None:
        """Return the forecast of a candidate; None if it cannot be traced."""
        records = self._records(candidate)
        if isinstance(records, TraceRefused):
            if self.model is None:
                raise Impossible(records.what, why=records.why, fix=records.fix)
            self._skip(candidate_name(candidate), records.what)
            return None
        self.model = self.model or records[0]
        if self._is_too_large(candidate, self.model):
            return None
        hardware = self.asked.hardware
        memory = estimate.predict_memory(records, candidate, hardware=hardware)
        host = hardware.host_memory_bytes
        return Forecast(
            candidate=candidate,
            memory=memory,
            time=estimate.predict_time(records, candidate, hardware=hardware),
            spare_bytes=hardware.card.memory_bytes - memory.high_bytes,
            host_spare_bytes=None if host is None else host - memory.host_bytes,
        )

    def _records(self, candidate: Candidate) -> list[TraceRecord] | TraceRefused:
        asked = self.asked
        wanted = estimate.trace_requests(asked.work, candidate, kernels=asked.kernels)
        records = self._look(wanted)
        if isinstance(records, TraceRefused):
            return records
        further = self._look(estimate.further_requests(records))
        if isinstance(further, TraceRefused):
            return further
        return records + further

    def _look(self, wanted: Sequence[TraceRequest]) -> list[TraceRecord] | TraceRefused:
        missing = [request for request in wanted if request not in self.traces]
        if missing:
            self.traces.update(zip(missing, self.look(missing), strict=True))
        records = []
        for request in wanted:
            record = self.traces[request]
            if isinstance(record, TraceRefused):
                return record
            records.append(record)
        return records


# ---- the ladder


def ladder(asked: PlanRequest) -> list[Candidate]:
    """Return the candidates from simple to complex, with the smallest micro-batch."""
    spreads = [spread for spread in _spreads(asked) if _is_requested(spread, asked)]
    if asked.work.load_in_4bit:
        spreads = [spread for spread in spreads if spread.strategy != "fsdp"]
    if not spreads:
        names = ("strategy", "sharding", "shard_size", "cpu_offload")
        fixed = [f"{name} {getattr(asked, name)}" for name in names if getattr(asked, name)]
        why = f"the request sets {', '.join(fixed)}"
        if asked.work.load_in_4bit:
            why += "; FSDP cannot shard 4-bit weights"
        raise Impossible(
            "no strategy for "
            f"{plural(asked.hardware.cards, asked.hardware.card.noun)} meets the request",
            why=why,
            fix="leave one of these settings out",
        )
    modes = RECOMPUTE if asked.recompute is None else (asked.recompute,)
    candidates = []
    for offload in (False, True):
        for mode in modes:
            for spread in spreads:
                if spread.cpu_offload is offload:
                    candidates.append(replace(spread, recompute=mode))
    return candidates


def _spreads(asked: PlanRequest) -> Iterator[Candidate]:
    """Yield how the model may be spread over all GPUs, the simplest first."""
    precision, ranks = asked.precision.value, asked.hardware.cards
    alone = ShardLayout(copies=1, shards=1)
    if ranks == 1 or asked.strategy == "single":
        yield Candidate(strategy="single", layout=alone, precision=precision)
    else:
        copies = ShardLayout(copies=ranks, shards=1)
        yield Candidate(strategy="ddp", layout=copies, precision=precision)
    layouts = list(_shard_layouts(asked, ranks))
    for offload in (False, True):
        for layout in layouts:
            plain = Candidate(
                strategy="fsdp", layout=layout, precision=precision, cpu_offload=offload
            )
            if asked.sharding == "shard_grad_op":
                yield replace(plain, reshard=False)
            elif ranks > 1 or asked.strategy == "fsdp" or offload:
                yield plain


def _shard_layouts(asked: PlanRequest, ranks: int) -> Iterator[ShardLayout]:
    """Yield copies over machines, whose gathers stay within a machine, then shards over all."""
    here, size = asked.hardware.cards_per_machine, asked.shard_size
    if size is not None:
        if ranks % size == 0 and (size > 1 or ranks == 1):
            yield ShardLayout(copies=ranks // size, shards=size)
        return
    machines = ranks // here
    together = 1
    while together < machines and here * together > 1:
        if machines % together == 0:
            yield ShardLayout(copies=machines // together, shards=here * together)
        together *= 2
    yield ShardLayout(copies=1, shards=ranks)


def _is_requested(spread: Candidate, asked: PlanRequest) -> bool:
    if asked.strategy is not None and spread.strategy != asked.strategy:
        return False
    if asked.cpu_offload is not None and spread.cpu_offload != asked.cpu_offload:
        return False
    is_hybrid = spread.layout.copies > 1
    if asked.sharding == "hybrid_shard":
        return spread.strategy == "fsdp" and is_hybrid
    if asked.sharding is not None or asked.shard_size is not None:
        return spread.strategy == "fsdp" and (asked.shard_size is not None or not is_hybrid)
    return True


def batch_splits(spread: Candidate, asked: PlanRequest) -> Iterator[Candidate]:
    """Yield a candidate with every sensible micro-batch size, the smallest first."""
    fixed = asked.micro_batch_size
    if asked.global_batch_size is None:
        sizes = [fixed] if fixed else [1, 2, 4, USUAL_MICRO_BATCH_SIZE]
        for size in sizes:
            yield replace(spread, micro_batch_size=size)
        return
    share = math.ceil(asked.global_batch_size / spread.layout.ranks)
    sizes = [min(fixed, share)] if fixed else _divisors_and_powers(share)
    for size in sizes:
        yield replace(spread, micro_batch_size=size, accumulation=math.ceil(share / size))


def _divisors_and_powers(share: int) -> list[int]:
    sizes = []
    for size in range(1, share + 1):
        if share % size == 0 or size & (size - 1) == 0:
            sizes.append(size)
    return sizes


# ---- the choice


def in_preference(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Order forecasts: of those as fast as the fastest, with a margin of memory, then the simplest.

    The fastest of the rest follow likewise.
    """
    remaining = sorted(forecasts, key=lambda forecast: -forecast.samples_per_s)
    ordered: list[Forecast] = []
    while remaining:
        fastest = remaining[0].samples_per_s
        equal = [one for one in remaining if one.samples_per_s * SAME_RATE >= fastest]
        ordered += sorted(equal, key=_preference)
        remaining = remaining[len(equal) :]
    return ordered


def _preference(forecast: Forecast) -> tuple[object, ...]:
    candidate = forecast.candidate
    card_bytes = forecast.spare_bytes + forecast.memory.high_bytes
    modes = ("none", "selective", "full")
    mode = 1 if isinstance(candidate.recompute, int) else modes.index(candidate.recompute)
    return (
        forecast.spare_bytes < _MARGIN * card_bytes,
        candidate.cpu_offload,
        ("single", "ddp", "fsdp").index(candidate.strategy),
        candidate.layout.copies == 1,  # hybrid keeps gathers within a machine
        mode,
        candidate.accumulation,
        -candidate.micro_batch_size if forecast.time is None else -forecast.samples_per_s,
    )


def make_plan(asked: PlanRequest, look: Look) -> Answer:
    """Return how to train; raise :class:`Impossible` with what would help if nothing fits."""
    search = Search(asked=asked, look=look)
    search.run(ladder(asked))
    table = _table(search.forecasts)
    offers: list[Offer] = []
    if not table or not table[0].probably_fits or table[0].candidate.cpu_offload:
        offers += _offers(asked, look)
    if not table or not table[0].probably_fits:
        raise _refusal(search, table, offers)
    assert search.model is not None, "there are forecasts"
    best = table[0]
    return Answer(
        asked=asked,
        chosen=Decision(value=best, reason=_reason(best, search)),
        table=tuple(table),
        skipped=tuple(search.skipped),
        offers=tuple(offers),
        findings=tuple(_findings(best, search)),
        parameter_count=search.model.parameter_count,
        tokens_per_sample=search.model.tokens_per_sample,
        traces=len(search.traces),
    )


def _table(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the best micro-batch of each candidate: those that fit, then the nearest."""
    fitting = in_preference([one for one in forecasts if one.fits])
    probable = [one for one in forecasts if one.probably_fits and not one.fits]
    missing = sorted(
        (one for one in forecasts if not one.probably_fits), key=lambda one: one.missing_bytes
    )
    table: dict[Candidate, Forecast] = {}
    for forecast in (*fitting, *in_preference(probable), *missing):
        spread = replace(forecast.candidate, micro_batch_size=1, accumulation=1)
        table.setdefault(spread, forecast)
    return list(table.values())


def describe_candidate(candidate: Candidate, noun: str) -> str:
    """Describe a candidate: ``fsdp over 8 GPUs, micro-batch 2 x 4, bf16, recompute full``."""
    batch = f"micro-batch {candidate.micro_batch_size}"
    if candidate.accumulation > 1:
        batch += f" x {candidate.accumulation}"
    parts = [candidate_name(candidate), batch, candidate.precision]
    if candidate.layout.ranks > 1:
        parts[0] += f" over {plural(candidate.layout.ranks, noun)}"
    if candidate.recompute != "none":
        parts.append(f"recompute {recompute_of(candidate)}")
    return ", ".join(parts)


def band_text(forecast: Forecast) -> str:
    """Return the expected memory with its band."""
    memory = forecast.memory
    return (
        f"{format_bytes(memory.total_bytes)} (band {format_bytes(memory.low_bytes)} to "
        f"{format_bytes(memory.high_bytes)})"
    )


def _reason(best: Forecast, search: Search) -> str:
    card = search.asked.hardware.card
    reason = (
        f"{describe_candidate(best.candidate, card.noun)}: {band_text(best)} of "
        f"{format_bytes(card.memory_bytes)} per {card.noun}"
    )
    for skipped in search.skipped:
        if skipped.name == "ddp" and best.candidate.strategy == "fsdp":
            return f"{reason}; ddp: {skipped.why}"
    return reason


def _findings(best: Forecast, search: Search) -> Iterator[Finding]:
    asked = search.asked
    noun = asked.hardware.card.noun
    if not best.fits:
        yield Finding(
            name="tight",
            status=Status.WARNING,
            what=f"this may run out of memory: at the high end of the band a {noun} lacks "
            f"{format_bytes(max(-best.spare_bytes, -(best.host_spare_bytes or 0)))}",
            fix="muster plan --find-batch-size on that hardware, or use more GPUs",
        )
    if best.time is None:
        yield Finding(
            name="not-timed",
            status=Status.NOTE,
            what=f"no speed is forecast for {asked.hardware.card.name}",
            fix="measure a few real steps there: muster plan --verify",
        )
    assert search.model is not None, "there is a forecast"
    for warning in search.model.warnings:
        yield Finding(
            name="cpu-kernel",
            status=Status.WARNING,
            what=warning,
            fix="call it as torch.nn.functional does, or measure: muster plan --find-batch-size",
        )
    batch, wanted = best.candidate.global_batch_size, asked.global_batch_size
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


def _offers(asked: PlanRequest, look: Look) -> Iterator[Offer]:
    """Yield LoRA and QLoRA with their forecasts: they change what is trained, so none is chosen."""
    work = asked.work
    if work.model_name_or_path is None:
        return
    for name, four_bit in (("LoRA", False), ("QLoRA", True)):
        adapted = _adapted(work, asked, four_bit=four_bit)
        if adapted == work or (work.load_in_4bit and not four_bit):
            continue
        wished = replace(asked, work=adapted, cpu_offload=False)
        if four_bit and asked.strategy == "fsdp":
            wished = replace(wished, strategy=None, sharding=None, shard_size=None)
        search = Search(asked=wished, look=look)
        try:
            search.run(ladder(wished))
        except Impossible as error:
            search.skipped.append(Skipped(name=name, why=error.what))
        table = _table(search.forecasts)
        if table and search.model is not None:
            yield Offer(
                name=name,
                forecast=table[0],
                settings=_changed_settings(adapted, asked),
                trained_count=search.model.trained_count,
            )


def _adapted(work: Work, asked: PlanRequest, *, four_bit: bool) -> Work:
    dtype = work.torch_dtype
    if dtype in (None, "float32"):  # frozen weights lose nothing in 16 bits
        dtype = _HALF.get(asked.precision.value, dtype)
    rank = work.lora_rank or _LORA_RANK
    return dataclasses.replace(work, lora_rank=rank, torch_dtype=dtype, load_in_4bit=four_bit)


def _changed_settings(work: Work, asked: PlanRequest) -> dict[str, str]:
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


def offer_text(offer: Offer, noun: str) -> str:
    """Describe an offer in one line."""
    missing = ""
    if not offer.forecast.probably_fits:
        missing = f", {format_bytes(offer.forecast.missing_bytes)} too much"
    return (
        f"{offer.name} (trains {offer.trained_count / 1e6:,.1f} M parameters): "
        f"{describe_candidate(offer.forecast.candidate, noun)}: {band_text(offer.forecast)}{missing}"
    )


def _refusal(search: Search, table: Sequence[Forecast], offers: Sequence[Offer]) -> Impossible:
    """Return the error for a request that does not fit: what is missing, and what would help."""
    asked = search.asked
    card = asked.hardware.card
    hints = []
    if table:
        nearest = table[0]
        what = describe_candidate(nearest.candidate, card.noun)
        why = f"the nearest, {what}, needs {band_text(nearest)}: {format_bytes(nearest.missing_bytes)} too much"
        if machines := _machines_needed(nearest, search):
            cards = machines * asked.hardware.cards_per_machine
            hints.append(
                f"about {cards} x {card.name} (--hardware {machines}x{asked.hardware.cards_per_machine}x{card.name})"
            )
    else:
        least = min(search.skipped, key=lambda skipped: skipped.needs_bytes or 0)
        why = f"{least.name}: {least.why}"
    if asked.micro_batch_size not in (None, 1):
        hints.append("a smaller train.micro_batch_size")
    if asked.recompute == "none":
        hints.append("--set train.activation_checkpointing=full")
    for offer in offers:
        if offer.forecast.probably_fits:
            hints.append(f"{offer_text(offer, card.noun)}: {offer.flags}")
    return Impossible(
        f"this training does not fit on {plural(asked.hardware.cards, card.noun)} with "
        f"{format_bytes(card.memory_bytes)} each",
        why=why,
        fix="; or ".join(hints) or "use GPUs with more memory, or shorter samples",
    )


def _machines_needed(nearest: Forecast, search: Search) -> int | None:
    """Return how many machines fit, if the states of the nearest candidate are sharded further."""
    asked, model = search.asked, search.model
    candidate = nearest.candidate
    if candidate.strategy == "single" or candidate.cpu_offload or model is None:
        return None
    states = estimate.states_bytes(model, candidate)
    factor = estimate.RESERVED if estimate.caches_memory(asked.hardware) else 1.0
    machines = asked.hardware.machines
    while machines < _MOST_MACHINES:
        machines *= 2
        ranks = machines * asked.hardware.cards_per_machine
        freed = factor * states * (1 - candidate.layout.shards / ranks)
        if nearest.missing_bytes <= freed:
            return machines
    return None
