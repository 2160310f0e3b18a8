"""Forecast the time of a training step, and speed and cost, from traces, rates and links."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import TraceRecord
from torchmuster.plan.timing import schedule, timeline
from torchmuster.plan.timing.rates import Rates
from torchmuster.units import MiB

# The C library returns larger results to the system at once, and must request new memory for the
# next ones (DEFAULT_MMAP_THRESHOLD_MAX of glibc).
_KEPT_BYTES = 32 * MiB
_NUMBER_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A forecast of one optimizer step."""

    step_s: float
    compute_s: float
    communication_s: float  # all collectives, one after the other
    exposed_s: float  # the part that is not hidden behind compute
    model_flops: float  # of one rank: forward and backward, without recomputation
    mfu: float | None  # model flops over the GPU's peak; None if the peak is unknown
    samples_per_s: float  # of all ranks
    tokens_per_s: float | None
    origin: str  # the rates that were used

    @property
    def scaling_efficiency(self) -> float:
        """The speed of a rank relative to one that waits for no other."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def predict_time(
    records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware, rates: Rates
) -> StepTime:
    """Forecast a step of the whole model from traces of a few blocks of it."""
    step = timeline.whole_step(records, candidate)
    card = hardware.card

    def duration(pace: timeline.TimelinePace) -> float:
        if pace.phase == "update" and candidate.cpu_offload and card.kind != "cpu":
            return sum(one.moved_bytes for one in pace.work) / rates.host_memory_bytes_s
        sharded = candidate.strategy == "fsdp" and pace.phase == "update"
        begin_s = rates.sharded_operation_s if sharded else rates.operation_s
        return _seconds(pace.work, card, rates, begin_s)

    spent = schedule.run_schedule(
        *(step, duration),
        record=records[0],
        candidate=candidate,
        hardware=hardware,
        rates=rates,
    )
    flops = _model_flops(step, records[0])
    highest = card.flops.get(_NUMBER_TYPES[candidate.precision])
    samples = records[0].samples_per_micro_batch / records[0].request.candidate.micro_batch_size
    per_s = candidate.global_batch_size * samples / spent.step_s if spent.step_s else math.inf
    tokens = records[0].tokens_per_sample
    return StepTime(
        step_s=spent.step_s,
        compute_s=spent.compute_s,
        communication_s=spent.communication_s,
        exposed_s=spent.step_s - spent.compute_s,
        model_flops=flops,
        mfu=flops / spent.step_s / highest if highest and spent.step_s else None,
        samples_per_s=per_s,
        tokens_per_s=None if tokens is None else tokens * per_s,
        origin=rates.source,
    )


def _seconds(
    work: Sequence[timeline.TimelineLoad], card: Gpu, rates: Rates, begin_s: float
) -> float:
    """Return the seconds of operations: each kind is limited by compute or by memory."""
    if card.bandwidth_bytes_s is None:
        raise _forecast_unknown(card, "its memory bandwidth")
    bandwidth = card.bandwidth_bytes_s * rates.memory
    total = begun = 0.0
    for one in work:
        moving = one.moved_bytes / rates.slow_operations.get(one.name, bandwidth)
        if rates.new_memory_bytes_s and one.made_bytes > one.times * _KEPT_BYTES:
            total += one.made_bytes / rates.new_memory_bytes_s
        computing = (
            one.flops / (_forecast_rate(card, one.dtype) * rates.compute) if one.flops else 0.0
        )
        total += max(moving, computing)
        begun += one.times
    beginning = begun * begin_s
    # The CPU launches operations while the GPU still works on others; on the CPU nothing overlaps.
    return total + beginning if card.kind == "cpu" else max(total, beginning)


def _forecast_rate(card: Gpu, dtype: str) -> float:
    """Return the rate for a dtype; dtypes without hardware support use the float32 rate."""
    rate = card.flops.get(dtype) or card.flops.get("float32")
    if not rate:
        raise _forecast_unknown(card, f"its {dtype} rate")
    return rate


def _forecast_unknown(card: Gpu, what: str) -> Impossible:
    return Impossible(
        f"no time can be forecast on {card.name}",
        why=f"{what} is unknown",
        fix="write its tflops and bandwidth into a cluster file, or run muster plan --calibrate",
    )


def _model_flops(step: Sequence[timeline.TimelinePart], record: TraceRecord) -> float:
    """Return the model flops of a step by the usual convention: a backward is two forwards.

    For frozen parameters, their part of the backward is left out, as in the trace.
    """
    forward = backward = 0.0
    known: dict[int, float] = {}
    for part in step:
        if id(part.paces) not in known:
            known[id(part.paces)] = sum(
                one.flops for pace in part.paces if not pace.recomputed for one in pace.work
            )
        if part.phase in ("forward", "loss"):
            forward += part.times * known[id(part.paces)]
        elif part.phase == "backward":
            backward += part.times * known[id(part.paces)]
    whole = record.trained_count == record.parameter_count
    return 3.0 * forward if whole else forward + backward


_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class CostForecast:
    """A whole training run, without interruptions, saves and evaluations."""

    hours: float
    card_hours: float
    price: float | None  # in the currency of the price per GPU hour


def forecast_cost(
    step: StepTime, hardware: Hardware, *, tokens: float | None = None, samples: float | None = None
) -> CostForecast:
    """Return hours and cost of a number of tokens or samples at the speed of a step."""
    if tokens is not None and step.tokens_per_s is None:
        raise Impossible(
            f"the time for {tokens:.3g} tokens cannot be forecast",
            why="the model's samples do not consist of tokens",
            fix="give a number of samples",
        )
    seconds = (samples or 0.0) / step.samples_per_s
    if tokens is not None and step.tokens_per_s is not None:
        seconds = tokens / step.tokens_per_s
    hours = seconds / _HOUR_S
    card_hours = hours * hardware.cards
    price = hardware.price_per_card_hour
    return CostForecast(
        hours=hours, card_hours=card_hours, price=None if price is None else card_hours * price
    )
