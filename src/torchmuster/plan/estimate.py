"""Memory and time of a candidate, computed from traces of a few of the model's blocks.

The middle blocks of a model are identical. So every figure of a stage, counted from the first or
the last block, is linear in the number of blocks, in the micro-batch size, and in the elements of a
rank's shards: two traces per quantity determine it. Stages are extended separately, because the
stage with the highest peak changes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torchmuster.plan.device_terms import DeviceTerm, outside_allocator
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.record import CATEGORIES, Part, Shape, TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout

# What PyTorch's allocator reserves, as a multiple of the tensors: the geometric mean over the
# published eager runs, and a band (up and down) that holds for each of them when it is left out of
# the mean (benchmarks/results/plan-published.md).
RESERVED = 1.29
BAND = 1.6**0.5
_EXACT_BAND = 1.05  # of devices whose freed memory is not cached
_CACHING = ("cuda", "rocm", "xpu")
# Shares of the vendors' peak rates that training reaches: matrix products, memory bandwidth, links.
COMPUTE_SHARE, MEMORY_SHARE, LINK_SHARE = 0.66, 0.8, 0.8
OPERATION_S = 6e-6  # to start one operation
# Published eager speeds over those computed with these shares, by GPU; and the band around them
# that held for all published runs (benchmarks/results/plan-published.md).
_TIME_CONSTANTS = {"A100": 1.09, "H100": 0.86, "H200": 0.97, "B200": 0.50}
TIME_BAND = 1.5
_HOST_LINK_BYTES_S, _HOST_MEMORY_BYTES_S = 20e9, 15e9  # of a GPU's share, with cpu_offload
MOST_SHARDS = 64  # that are traced: more take long, and are computed from these two numbers
_FEW_SHARDS = 8
WHOLE_ELEMENTS = 2**24  # of logits that the loss processes at once, as in train/losses.py
_TRACED_ACCUMULATION = 2
_COMPUTE_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# nf4: half a byte, a scale of 8 bits for 64 weights, and one of 32 bits for 256 of these.
_FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
ITEM_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "nf4": _FOUR_BIT_BYTES,
}
# Sizes of the optimizer's states, in copies of the trained parameters, at least.
OPTIMIZER_COPIES = {"adamw": 2.0, "sgd": 1.0, "muon": 1.0, "adafactor": 0.0, "adamw_8bit": 0.5}

# One number of a trace: ("peak", stage, category), ("cost", part, name), ("host",), ("input",).
Figures: TypeAlias = dict[tuple[Any, ...], float]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A rough forecast of one optimizer step."""

    step_s: float
    compute_s: float
    communication_s: float
    mfu: float | None  # model flops over the GPU's peak; None if the peak is unknown
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
    checkpoint_bytes: int


# ---- which traces are needed


def trace_requests(
    work: Work, candidate: Candidate, *, kernels: Literal["cpu", "cuda"]
) -> list[TraceRequest]:
    """Return the traces from which a candidate is computed; candidates of a family share them.

    Two depths (2 blocks are not enough, since prefetching spans two), up to two micro-batch sizes
    and, above 64 shards, two numbers of shards.
    """
    every = _period(candidate)
    layout = candidate.layout
    requests = []
    for shards in _traced_shards(candidate):
        for size in _traced_sizes(work, candidate.micro_batch_size, kernels):
            for blocks in (3 * every, 4 * every):
                traced = replace(
                    candidate,
                    layout=ShardLayout(copies=min(layout.copies, 2), shards=shards),
                    micro_batch_size=size,
                    accumulation=min(candidate.accumulation, _TRACED_ACCUMULATION),
                )
                requests.append(
                    TraceRequest(work=work, candidate=traced, blocks=blocks, kernels=kernels)
                )
    return requests


def further_requests(records: Sequence[TraceRecord]) -> list[TraceRequest]:
    """Return further traces if every n-th block is recomputed and n does not divide the depth."""
    requests = []
    for record in records:
        every = _period(record.request.candidate)
        rest = record.blocks % every
        if record.blocks_traced < record.blocks and rest and not record.blocks_traced % every:
            requests.append(replace(record.request, blocks=record.blocks_traced + rest))
    return requests


def _period(candidate: Candidate) -> int:
    """Return after how many blocks a model repeats: recomputing can skip blocks."""
    return candidate.recompute if isinstance(candidate.recompute, int) else 1


def _traced_shards(candidate: Candidate) -> tuple[int, ...]:
    shards = candidate.layout.shards
    if candidate.strategy != "fsdp" or shards <= MOST_SHARDS:
        return (shards,)
    return (_FEW_SHARDS, MOST_SHARDS)


def _traced_sizes(work: Work, size: int, kernels: Literal["cpu", "cuda"]) -> tuple[int, ...]:
    """Return one or two micro-batch sizes to trace.

    A single sample needs fewer copies than several. Above a border, the loss of a language model is
    computed in parts.
    """
    if size == 1 or kernels == "cpu":
        return (size,)
    usual_loss = "language_model" if work.model_name_or_path else "cross_entropy"
    if (work.loss or usual_loss) != "language_model":
        return (2, 3)
    border = _largest_whole(work)
    if border is None:  # two close sizes keep the error small
        low = 1 << (size.bit_length() - 1)
        return (low,) if low == size else (low, 2 * low)
    if size > border:
        low = max(border + 1, 2)
        return (low, low + 1)
    return (2, 3) if border > 2 else (2,)


def _largest_whole(work: Work) -> int | None:
    """Return the most samples whose loss is computed at once; None if unknown."""
    if work.model_name_or_path is None or work.sequence_length is None:
        return None
    path = Path(work.folder) / Path(work.model_name_or_path).expanduser() / "config.json"
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError):
        return None
    if not isinstance(vocabulary, int) or vocabulary < 1:
        return None
    return max(1, WHOLE_ELEMENTS // vocabulary) // work.sequence_length


# ---- from traces to the whole model


def whole_figures(
    records: Sequence[TraceRecord], candidate: Candidate, *, blocks: int | None = None
) -> Figures:
    """Return all figures of a candidate, from the records of its :func:`trace_requests`."""
    usable = [record for record in records if _has_whole_remainder(record)]
    depth = usable[0].blocks if blocks is None else blocks
    shards = candidate.layout.shards
    by_shards: dict[int, list[TraceRecord]] = {}
    for record in usable:
        by_shards.setdefault(record.request.candidate.layout.shards, []).append(record)
    computed = {}
    for number, group in by_shards.items():
        computed[number] = _at_depth(group, depth, candidate.micro_batch_size)
    if shards in computed or candidate.strategy != "fsdp":
        return computed.get(shards) or next(iter(computed.values()))
    shapes = usable[0].parameters
    few, many, wanted = (
        shard_elements(shapes, number, blocks=depth)
        for number in (_FEW_SHARDS, MOST_SHARDS, shards)
    )
    share = (wanted - few) / (many - few)
    return _extended(computed[_FEW_SHARDS], computed[MOST_SHARDS], share)


def _has_whole_remainder(record: TraceRecord) -> bool:
    every = _period(record.request.candidate)
    return (record.blocks - record.blocks_traced) % every == 0


def _at_depth(records: Sequence[TraceRecord], blocks: int, size: int) -> Figures:
    by_depth: dict[int, dict[int, Figures]] = {}
    for record in records:
        of_depth = by_depth.setdefault(record.blocks_traced, {})
        of_depth[record.request.candidate.micro_batch_size] = _figures(record)
    at_size = {depth: _interpolated(by_size, size) for depth, by_size in by_depth.items()}
    return _interpolated(at_size, blocks)


def _interpolated(known: Mapping[int, Figures], at: int) -> Figures:
    """Return the figures at a point, on the line through the two lowest known ones."""
    if at in known:
        return known[at]
    low, high = sorted(known)[:2]
    return _extended(known[low], known[high], (at - low) / (high - low))


def _extended(low: Figures, high: Figures, share: float) -> Figures:
    figures = {}
    for key, value in low.items():
        if key in high:
            figures[key] = value + share * (high[key] - value)
    return figures


def _figures(record: TraceRecord) -> Figures:
    """Return the figures of a record; a stage in the middle can be counted from both ends."""
    figures: Figures = {("input",): record.input_bytes, ("host",): record.host_bytes}
    for peak in record.peaks:
        number = peak.block if peak.block is not None else peak.after_block
        for counted in _counted(number, record):
            is_block = peak.block is not None
            stage = (peak.phase, peak.micro_batch, is_block, counted)
            if figures.get(("peak", stage, "all"), -1) >= peak.peak_bytes:
                continue
            figures["peak", stage, "all"] = peak.peak_bytes
            for category in CATEGORIES:
                figures["peak", stage, category] = peak.by_category.get(category, 0)
    for part, cost in record.costs.items():
        figures["cost", part, "operations"] = cost.operations
        figures["cost", part, "forward"] = cost.forward_flops
        figures["cost", part, "moved"] = cost.moved_bytes
        for dtype, flops in cost.flops.items():
            figures["cost", part, "flops", dtype] = flops
        for ranks, size in cost.sent_bytes.items():
            figures["cost", part, "sent", ranks] = size
    return figures


def _counted(number: int | None, record: TraceRecord) -> Iterator[int | None]:
    """Yield a block's number counted from the first and from the last block, if near enough."""
    if number is None or record.blocks_traced >= record.blocks:
        yield number
        return
    every = _period(record.request.candidate)
    reach = 2 * every
    if number < reach:
        yield number
    if record.blocks_traced - number <= reach + record.blocks_traced % every:
        yield number - record.blocks_traced


# ---- memory


def predict_memory(
    records: Sequence[TraceRecord],
    candidate: Candidate,
    *,
    hardware: Hardware,
    blocks: int | None = None,
) -> Memory:
    """Return what a rank of this candidate needs."""
    figures = whole_figures(records, candidate, blocks=blocks)
    depth = records[0].blocks if blocks is None else blocks
    stages = {
        key[1]: value for key, value in figures.items() if key[0] == "peak" and key[2] == "all"
    }
    stage = max(stages, key=lambda stage: stages[stage])
    # A step's micro-batches are all on the device from its beginning; two were traced.
    waiting = max(candidate.accumulation - _TRACED_ACCUMULATION, 0) * figures["input",]
    tensors = round(stages[stage] + waiting)
    by_category: dict[str, int] = {name: round(figures["peak", stage, name]) for name in CATEGORIES}
    by_category["activations"] += round(waiting)
    terms = outside_allocator(candidate, hardware)
    middle, low, high = device_bytes(tensors, hardware)
    phase, _, is_block, number = stage
    place = f"{phase}, block {number % depth}" if is_block and number is not None else phase
    ranks_here = min(hardware.cards_per_machine, candidate.layout.ranks)
    return Memory(
        tensor_bytes=tensors,
        by_category=by_category,
        peak_at=place,
        outside=terms,
        total_bytes=middle + sum(term.size_bytes for term in terms),
        low_bytes=low + sum(term.low_bytes for term in terms),
        high_bytes=high + sum(term.high_bytes for term in terms),
        host_bytes=round(figures["host",]) * ranks_here,
        checkpoint_bytes=checkpoint_bytes(records[0], depth),
    )


def caches_memory(hardware: Hardware) -> bool:
    """Return whether PyTorch caches freed memory on such a device."""
    return hardware.card.kind in _CACHING


def device_bytes(tensors: int, hardware: Hardware) -> tuple[int, int, int]:
    """Return device memory for tensors: expected, lowest and highest."""
    if not caches_memory(hardware):
        return tensors, tensors, round(tensors * _EXACT_BAND)
    low = max(RESERVED / BAND, 1.0)
    return round(tensors * RESERVED), round(tensors * low), round(tensors * RESERVED * BAND)


def states_bytes(record: TraceRecord, candidate: Candidate) -> int:
    """Return the least bytes of weights, gradients and moments on a rank's device."""
    if candidate.cpu_offload:
        return 0
    item = _item_bytes(record.parameters)
    copies = 1.0 + OPTIMIZER_COPIES.get(record.request.work.optimizer, 0.0)
    states = item * (record.parameter_count + copies * record.trained_count)
    least = states / candidate.layout.shards
    if candidate.strategy == "fsdp" and not candidate.reshard:  # weights stay until the backward
        least += record.parameter_count * min(item, ITEM_BYTES[_COMPUTE_TYPES[candidate.precision]])
    return int(least)


def _item_bytes(shapes: Iterable[Shape]) -> float:
    """Return the mean bytes per element: traces of few blocks have all dtypes of a model."""
    elements = size = 0.0
    for shape in shapes:
        elements += math.prod(shape.shape)
        size += math.prod(shape.shape) * ITEM_BYTES.get(shape.dtype, 1.0)
    return size / max(elements, 1.0)


def checkpoint_bytes(record: TraceRecord, blocks: int) -> int:
    """Return the size of a checkpoint; frozen weights of a Hugging Face model are not saved."""
    work = record.request.work
    total = 0.0
    for shape, times in _with_times(record.parameters, blocks):
        if shape.trained or work.model_name_or_path is None:
            copies = 1 + (OPTIMIZER_COPIES.get(work.optimizer, 0.0) if shape.trained else 0.0)
            size = math.prod(shape.shape) * ITEM_BYTES.get(shape.dtype, 1.0)
            total += copies * times * size
    return round(total)


def shard_elements(shapes: Sequence[Shape], shards: int, *, blocks: int) -> int:
    """Return the elements of a rank's shards: FSDP gives it ``ceil(rows / shards)`` rows."""
    return sum(times * _shard(shape, shards) for shape, times in _with_times(shapes, blocks))


def gathered_share(shapes: Sequence[Shape], shards: int) -> float:
    """Return the ratio of a gathered block to its own size: padding rows are gathered, too."""
    numbers = [shape.block for shape in shapes if shape.block is not None]
    block = [shape for shape in shapes if numbers and shape.block == numbers[0]] or list(shapes)
    whole = sum(math.prod(shape.shape) for shape in block)
    return shards * sum(_shard(shape, shards) for shape in block) / max(whole, 1)


def _shard(shape: Shape, shards: int) -> int:
    if not shape.shape:
        return 1  # a scalar is on every rank
    rows, *rest = shape.shape
    return math.ceil(rows / shards) * math.prod(rest)


def _with_times(shapes: Sequence[Shape], blocks: int) -> Iterator[tuple[Shape, int]]:
    """Yield each shape with how often the model has it: one block represents all of them."""
    numbers = {shape.block for shape in shapes if shape.block is not None}
    is_whole = len(numbers) >= blocks
    for shape in shapes:
        if shape.block is None or is_whole:
            yield shape, 1
        elif shape.block == min(numbers):
            yield shape, blocks


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
    earlier = candidate.accumulation - 1
    compute = _compute_seconds(figures, "last", card)
    sent = _sent_seconds(figures, "last", candidate, hardware)
    busy = max(compute, sent)
    if earlier:
        first = _compute_seconds(figures, "first", card)
        first_sent = _sent_seconds(figures, "first", candidate, hardware)
        compute += earlier * first
        sent += earlier * first_sent
        busy += earlier * max(first, first_sent)
    if candidate.cpu_offload:
        moved = figures.get(("cost", "update", "moved"), 0.0)
        update = moved / _HOST_MEMORY_BYTES_S + figures["host",] / 2 / _HOST_LINK_BYTES_S
    else:
        update = _compute_seconds(figures, "update", card)
    constant = time_constant(card)
    step_s = (busy + update) / constant
    samples_per_s = candidate.global_batch_size / step_s
    tokens = records[0].tokens_per_sample
    return StepTime(
        step_s=step_s,
        compute_s=(compute + update) / constant,
        communication_s=sent / constant,
        mfu=_mfu(figures, records[0], candidate, card, step_s),
        samples_per_s=samples_per_s,
        tokens_per_s=None if tokens is None else tokens * samples_per_s,
    )


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
        "all": (layout.ranks, min(layout.ranks, here)),
    }
    seconds = 0.0
    for name, (ranks, ranks_here) in groups.items():
        size = figures.get(("cost", part, "sent", name), 0.0)
        rates = []
        if ranks_here > 1:
            rates.append(hardware.within.bytes_s)
        if ranks > ranks_here:
            rates.append(hardware.between.bytes_s * ranks_here)
        if rates:
            seconds += size * (1 - 1 / ranks) / (LINK_SHARE * min(rates))
    return seconds


def _mfu(
    figures: Figures, record: TraceRecord, candidate: Candidate, card: Gpu, step_s: float
) -> float | None:
    """Return the model flops (a backward is two forwards) over the GPU's peak."""
    peak = card.flops.get(_COMPUTE_TYPES[candidate.precision])
    if not peak or record.trained_count != record.parameter_count:
        return None
    forward = figures.get(("cost", "last", "forward"), 0.0)
    forward += (candidate.accumulation - 1) * figures.get(("cost", "first", "forward"), 0.0)
    return 3 * forward / step_s / peak
