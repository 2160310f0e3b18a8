"""Memory and time of a candidate, computed from traces of a few of the model's blocks.

The middle blocks of a model are identical. So every figure of a stage, counted from the first or
the last block, is linear in the number of blocks, in a large micro-batch, and in the elements of a
rank's shards: two traces per quantity determine it. Stages are extended separately, because the
stage with the highest peak changes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torchmuster.plan import device_terms
from torchmuster.plan.device_terms import DeviceTerm, outside_allocator
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import CATEGORIES, Part, TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout

# What PyTorch's allocator reserves, as a multiple of the tensors: the geometric mean over the
# published eager runs, and a band (up and down) that holds for each of them when it is left out of
# the mean (benchmarks/results/plan-published.md).
RESERVED = 1.29
BAND = 1.6**0.5
# Published eager speeds over those computed with the shares below, by GPU; and the band around them
# that held for all published runs (benchmarks/results/plan-published.md).
_TIME_CONSTANTS = {"A100": 1.09, "H100": 0.86, "H200": 0.97, "B200": 0.50}
TIME_BAND = 1.5
# Shares of the vendors' peak rates that training reaches: matrix products, memory bandwidth, links.
COMPUTE_SHARE, MEMORY_SHARE, LINK_SHARE = 0.66, 0.8, 0.8
OPERATION_S = 6e-6  # to start one operation
MOST_SHARDS = 64  # that are traced: more take long, and are computed from these two numbers
# Sizes of the optimizer's states, in copies of the trained parameters, at least.
OPTIMIZER_COPIES = {"adamw": 2.0, "sgd": 1.0}
COMPUTE_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# nf4: half a byte, a scale of 8 bits for 64 weights, and one of 32 bits for 256 of these.
_FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
ITEM_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "nf4": _FOUR_BIT_BYTES,
}
_EXACT_BAND = 1.05  # of devices whose freed memory is not cached
_CACHING = ("cuda", "rocm", "xpu")
_HOST_LINK_BYTES_S, _HOST_MEMORY_BYTES_S = 20e9, 15e9  # of a GPU's share, with cpu_offload
_FEW_SHARDS = 8
_TRACED_BLOCKS = (3, 4)  # two are not enough, since prefetching spans two
_REACH = 2  # blocks from either end of the model that are not like the middle ones
# Micro-batches up to this size are traced. From here on every figure is linear in the size: the
# loss of a language model is computed in parts, which fewer samples do not need.
_LARGEST_SIZE = 8
_TRACED_ACCUMULATION = 2

# One number of a trace: ("peak", stage, category), ("cost", part, name, …), ("host",), ("input",).
Figures: TypeAlias = dict[tuple[Any, ...], float]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A rough forecast of one optimizer step."""

    step_s: float
    compute_s: float
    samples_per_s: float  # of all ranks
    tokens_per_s: float | None

    @property
    def waiting_share(self) -> float:
        """The share of a step that is spent waiting for other ranks."""
        return 1.0 - self.compute_s / self.step_s


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one rank needs of its device; host memory is per machine."""

    tensor_bytes: int  # peak of tensors
    by_category: Mapping[str, int]  # at that moment
    peak_at: str  # the stage of the peak
    outside: tuple[DeviceTerm, ...]
    total_bytes: int  # of the device, expected
    low_bytes: int
    high_bytes: int
    host_bytes: int  # of one machine, with cpu_offload


# ---- from traces to the whole model


def trace_requests(
    work: Work, candidate: Candidate, *, kernels: Literal["cpu", "cuda"]
) -> list[TraceRequest]:
    """Return the traces from which a candidate is computed; candidates of a family share them."""
    depths: tuple[int | None, ...] = _TRACED_BLOCKS
    if isinstance(candidate.recompute, int):
        depths = (None,)  # recomputation skips blocks, so the middle ones differ
    layout = candidate.layout
    shards: tuple[int, ...] = (layout.shards,)
    if layout.shards > MOST_SHARDS:
        shards = (_FEW_SHARDS, MOST_SHARDS)
    sizes: tuple[int, ...] = (candidate.micro_batch_size,)
    if candidate.micro_batch_size > _LARGEST_SIZE:
        sizes = (_LARGEST_SIZE, _LARGEST_SIZE + 1)
    requests = []
    for number in shards:
        for size in sizes:
            traced = replace(
                candidate,
                layout=ShardLayout(copies=min(layout.copies, 2), shards=number),
                micro_batch_size=size,
                accumulation=min(candidate.accumulation, _TRACED_ACCUMULATION),
            )
            for blocks in depths:
                requests.append(
                    TraceRequest(work=work, candidate=traced, blocks=blocks, kernels=kernels)
                )
    return requests


def whole_figures(records: Sequence[TraceRecord], candidate: Candidate) -> Figures:
    """Return all figures of a candidate, from the records of its :func:`trace_requests`."""
    model = records[0]
    known: dict[tuple[int, ...], Figures] = {}
    for record in records:
        traced = record.request.candidate
        elements = shard_elements(model, traced.layout.shards)
        known[elements, traced.micro_batch_size, record.blocks_traced] = _figures(record)
    elements = shard_elements(model, candidate.layout.shards)
    wanted = (elements, candidate.micro_batch_size, model.blocks)
    for axis in (2, 1, 0):  # depth, micro-batch, shards
        lines: dict[tuple[int, ...], dict[int, Figures]] = {}
        for point, figures in known.items():
            lines.setdefault(point[:axis], {})[point[axis]] = figures
        known = {point: _on_line(line, wanted[axis]) for point, line in lines.items()}
    return known[()]


def _on_line(known: Mapping[int, Figures], at: int) -> Figures:
    """Return the figures at a point, on the line through the two known ones.

    A figure that only one of them has, such as that of a stage of the larger one, is kept.
    """
    if at in known or len(known) == 1:
        return known.get(at) or next(iter(known.values()))
    low, high = sorted(known)
    share = (at - low) / (high - low)
    figures = {**known[high], **known[low]}
    for key in known[low].keys() & known[high].keys():
        figures[key] += share * (known[high][key] - figures[key])
    return figures


def _figures(record: TraceRecord) -> Figures:
    """Return the figures of a record; a block in the middle can be counted from both ends."""
    figures: Figures = {("input",): record.input_bytes, ("host",): record.host_bytes}
    for peak in record.peaks:
        for number in _counted(peak.block, record):
            stage = (peak.phase, peak.micro_batch, number)
            figures["peak", stage, "all"] = peak.peak_bytes
            for category in CATEGORIES:
                figures["peak", stage, category] = peak.by_category.get(category, 0)
    for part, cost in record.costs.items():
        figures["cost", part, "operations"] = cost.operations
        figures["cost", part, "moved"] = cost.moved_bytes
        for dtype, flops in cost.flops.items():
            figures["cost", part, "flops", dtype] = flops
        for group, size in cost.sent_bytes.items():
            figures["cost", part, "sent", group] = size
    return figures


def _counted(number: int | None, record: TraceRecord) -> Iterator[int | None]:
    """Yield a block's number counted from the first and from the last block, if near enough."""
    if number is None or record.blocks_traced >= record.blocks:
        yield number
        return
    if number < _REACH:
        yield number
    if record.blocks_traced - number <= _REACH:
        yield number - record.blocks_traced


# ---- memory


def predict_memory(
    records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
) -> Memory:
    """Return what a rank of this candidate needs."""
    figures = whole_figures(records, candidate)
    stages = {}
    for key, size in figures.items():
        if key[0] == "peak" and key[2] == "all":
            stages[key[1]] = size
    stage = max(stages, key=lambda stage: stages[stage])
    # The micro-batches of a step stay on the device until the next step has been applied: a search
    # for values that are not finite needs them. Two of each step were traced.
    waiting = 2 * max(candidate.accumulation - _TRACED_ACCUMULATION, 0) * figures["input",]
    tensors = round(stages[stage] + waiting)
    by_category: dict[str, int] = {name: round(figures["peak", stage, name]) for name in CATEGORIES}
    by_category["activations"] += round(waiting)
    terms = outside_allocator(candidate, hardware)
    outside = sum(term.size_bytes for term in terms)
    middle, low, high = device_bytes(tensors, hardware)
    phase, _, number = stage
    place = phase if number is None else f"{phase}, block {number % records[0].blocks}"
    ranks_here = min(hardware.cards_per_machine, candidate.layout.ranks)
    return Memory(
        tensor_bytes=tensors,
        by_category=by_category,
        peak_at=place,
        outside=terms,
        total_bytes=middle + outside,
        low_bytes=round(low + outside / device_terms.BAND),
        high_bytes=round(high + outside * device_terms.BAND),
        host_bytes=round(figures["host",]) * ranks_here,
    )


def device_bytes(tensors: int, hardware: Hardware) -> tuple[int, int, int]:
    """Return device memory for tensors: expected, lowest and highest."""
    if hardware.card.kind not in _CACHING:
        return tensors, tensors, round(tensors * _EXACT_BAND)
    low = max(RESERVED / BAND, 1.0)
    return round(tensors * RESERVED), round(tensors * low), round(tensors * RESERVED * BAND)


def states_bytes(record: TraceRecord, candidate: Candidate) -> int:
    """Return the least bytes of weights, gradients and moments on a rank's device."""
    if candidate.cpu_offload:
        return 0
    elements = size = 0.0  # traces of few blocks have all dtypes of a model
    for shape in record.parameters:
        elements += math.prod(shape.shape)
        size += math.prod(shape.shape) * ITEM_BYTES.get(shape.dtype, 1.0)
    item = size / max(elements, 1.0)
    copies = 1.0 + OPTIMIZER_COPIES.get(record.request.work.optimizer, 0.0)
    states = item * (record.parameter_count + copies * record.trained_count)
    least = states / candidate.layout.shards
    if candidate.strategy == "fsdp" and not candidate.reshard:  # weights stay until the backward
        least += record.parameter_count * min(item, ITEM_BYTES[COMPUTE_TYPES[candidate.precision]])
    return int(least)


def shard_elements(record: TraceRecord, shards: int) -> int:
    """Return the elements of a rank's shards: FSDP gives it ``ceil(rows / shards)`` rows."""
    in_blocks = outside = 0
    for shape in record.parameters:
        rows, *rest = shape.shape or (shards,)  # a scalar is on every rank
        size = math.ceil(rows / shards) * math.prod(rest)
        if shape.block is None:
            outside += size
        else:
            in_blocks += size
    return outside + in_blocks * record.blocks // max(record.blocks_traced, 1)


# ---- time


def predict_time(
    records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
) -> StepTime | None:
    """Forecast a step by a roofline; None on a CPU, and on a GPU whose rates are unknown.

    Products run at a share of the peak rate, all other operations at a share of the memory
    bandwidth, and collectives beside them. Transfers of cpu_offload block.
    """
    card = hardware.card
    if card.kind == "cpu" or card.bandwidth_bytes_s is None or not card.flops:
        return None
    figures = whole_figures(records, candidate)
    parts: dict[Part, int] = {"first": candidate.accumulation - 1, "last": 1}
    compute_s = busy_s = 0.0
    for part, times in parts.items():
        seconds = _compute_seconds(figures, part, card)
        compute_s += times * seconds
        busy_s += times * max(seconds, _sent_seconds(figures, part, candidate, hardware))
    update_s = _compute_seconds(figures, "update", card)
    if candidate.cpu_offload:
        moved = figures.get(("cost", "update", "moved"), 0.0)
        update_s = moved / _HOST_MEMORY_BYTES_S + figures["host",] / 2 / _HOST_LINK_BYTES_S
    constant = time_constant(card)
    samples_per_s = candidate.global_batch_size * constant / (busy_s + update_s)
    tokens = records[0].request.work.sequence_length
    return StepTime(
        step_s=(busy_s + update_s) / constant,
        compute_s=(compute_s + update_s) / constant,
        samples_per_s=samples_per_s,
        tokens_per_s=None if tokens is None else tokens * samples_per_s,
    )


def seconds_text(seconds: float) -> str:
    """Format the time of a step with two significant digits."""
    if seconds < 1:
        return f"{float(f'{seconds * 1000:.2g}'):g} ms"
    return f"{float(f'{seconds:.2g}'):,g} s"


def time_constant(card: Gpu) -> float:
    """Return the published speed of a GPU over the computed one; 1 where none was published."""
    for name, constant in _TIME_CONSTANTS.items():
        if card.name.startswith(name):
            return constant
    return 1.0


def _compute_seconds(figures: Figures, part: Part, card: Gpu) -> float:
    seconds = 0.0
    for key, value in figures.items():
        if key[:3] == ("cost", part, "moved"):
            seconds += value / (MEMORY_SHARE * (card.bandwidth_bytes_s or math.inf))
        elif key[:3] == ("cost", part, "flops"):
            rate = card.flops.get(key[3]) or card.flops.get("float32") or max(card.flops.values())
            seconds += value / (COMPUTE_SHARE * rate)
    # The CPU starts operations while the GPU still works on others.
    return max(seconds, OPERATION_S * figures.get(("cost", part, "operations"), 0.0))


def _sent_seconds(figures: Figures, part: Part, candidate: Candidate, hardware: Hardware) -> float:
    layout, here = candidate.layout, hardware.cards_per_machine
    # Number of ranks of each group, and of those on one machine: shards are adjacent.
    groups = {
        "shards": (layout.shards, min(layout.shards, here)),
        "copies": (layout.copies, min(layout.copies, max(here // layout.shards, 1))),
    }
    seconds = 0.0
    for name, (ranks, ranks_here) in groups.items():
        rates = []
        if ranks_here > 1:
            rates.append(hardware.card.within_bytes_s)
        if ranks > ranks_here:
            rates.append(hardware.between_bytes_s * ranks_here)
        if rates:
            size = figures.get(("cost", part, "sent", name), 0.0)
            seconds += size * (1 - 1 / ranks) / (LINK_SHARE * min(rates))
    return seconds
