"""Forecast the memory of a rank for any depth, micro-batch size and number of shards.

Three figures with different sources: the peak of tensors (traced, then computed), what PyTorch's
allocator reserves for them (simulated), and other device memory (published figures).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import depth, log_depth, shard_degree
from torchmuster.plan.memory.allocator import Kind, simulate
from torchmuster.plan.memory.depth import DepthPlace, Level, is_part
from torchmuster.plan.memory.device_terms import DeviceTerm, outside_allocator
from torchmuster.plan.memory.model_figures import model_configuration
from torchmuster.plan.memory.shard_degree import saving_memory
from torchmuster.plan.record import Peak, TraceRecord, TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout

WHOLE_ELEMENTS = 2**24  # of logits that the loss processes at once, as in train/losses.py


def traced_sizes(
    work: Work, micro_batch_size: int, *, kernels: Literal["cpu", "cuda"]
) -> tuple[int, ...]:
    """Return one or two micro-batch sizes to trace, from which this one is computed."""
    if micro_batch_size == 1 or kernels == "cpu":
        return (micro_batch_size,)
    if not _loss_has_parts(work):
        return (2, 3)
    border = _largest_whole(work)
    if border is None:
        # If the limit is unknown, two close sizes keep the error small.
        low = 1 << (micro_batch_size.bit_length() - 1)
        return (low,) if low == micro_batch_size else (low, 2 * low)
    if micro_batch_size > border:
        low = max(border + 1, 2)
        return (low, low + 1)
    return (2, 3) if border > 2 else (2,)


def _loss_has_parts(work: Work) -> bool:
    usual = "language_model" if work.model_name_or_path else "cross_entropy"
    return (work.loss or usual) == "language_model"


def _largest_whole(work: Work) -> int | None:
    """Return the most samples whose loss is computed at once; None if unknown."""
    told = model_configuration(work)
    vocabulary = None if told is None else told.get("vocab_size")
    if not isinstance(vocabulary, int) or work.sequence_length is None:
        return None
    return max(1, WHOLE_ELEMENTS // vocabulary) // work.sequence_length


# Share of the tensors, used if there is no log to simulate: published runs reserve 20 % more.
_RESERVED_GUESS = 1.2
_RESERVED_GUESS_HIGH = 1.3
USUAL_ALLOCATOR = "the allocator: assumed to reserve 20 % more, as in published runs"
# The simulation of two published runs was 3 and 4 % too low.
_SIMULATED_HIGH = 1.05
_CACHING = ("cuda", "rocm", "xpu")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one rank needs; ``host`` bytes are per machine, ``save`` bytes per checkpoint."""

    tensor_bytes: int  # peak of tensors
    by_category: Mapping[str, int]  # at that moment
    where: Peak | None  # None: computed by a formula
    reserved_bytes: int | None  # reserved by the allocator; None: not simulated
    outside: tuple[DeviceTerm, ...]
    total_bytes: int  # of the device
    low_bytes: int
    high_bytes: int
    host_bytes: int  # of one machine: memory of cpu_offload
    save_host_bytes: int  # of one machine: copies during an async save
    save_bytes: int  # of one checkpoint, on disk
    origin: str  # how these figures were obtained


def trace_family(
    candidate: Candidate, work: Work, *, kernels: Literal["cpu", "cuda"] = "cuda"
) -> Candidate:
    """Return the candidate whose traces apply to this one, without the sizes that are computed."""
    layout = candidate.layout
    shards = shard_degree.traced_degrees(layout.shards)[0] if candidate.strategy == "fsdp" else 1
    return replace(
        candidate,
        layout=ShardLayout(copies=min(layout.copies, 2), shards=shards),
        micro_batch_size=traced_sizes(work, candidate.micro_batch_size, kernels=kernels)[0],
        accumulation=min(candidate.accumulation, 2),
    )


def trace_requests(
    work: Work, candidate: Candidate, *, kernels: Literal["cpu", "cuda"], keep_log: bool = False
) -> list[TraceRequest]:
    """Return the traces needed for the memory of a candidate and all others of its family.

    Two depths and up to two micro-batch sizes; if there are too many shards to trace, also both
    depths with 64. With ``keep_log`` the micro-batch has the candidate's own size, and the records
    have a log to simulate the allocator: for the few preferred candidates.
    """
    one = trace_family(candidate, work, kernels=kernels)
    size = candidate.micro_batch_size
    sizes = (size,) if keep_log else traced_sizes(work, size, kernels=kernels)
    found = [
        TraceRequest(
            work=work,
            candidate=replace(one, micro_batch_size=size),
            blocks=blocks,
            kernels=kernels,
            keep_log=keep_log,
        )
        for blocks in depth.traced_depths(candidate)
        for size in sizes
    ]
    if candidate.strategy != "fsdp":
        return found
    of_one_size = found[:: len(sizes)]
    for shards in shard_degree.traced_degrees(candidate.layout.shards)[1:]:
        layout = replace(one.layout, shards=shards)
        found += [
            replace(request, candidate=replace(request.candidate, layout=layout))
            for request in of_one_size
        ]
    return found


def further_requests(records: Sequence[TraceRecord]) -> list[TraceRequest]:
    """Return the further traces needed once the model's depth is known: none for most models.

    If every n-th block is recomputed and the depth is not a multiple of n, the traces need the same
    remainder.
    """
    wanted: list[TraceRequest] = []
    for record in records:
        every = depth.period(record.request.candidate)
        if is_part(record) and record.blocks % every and not record.blocks_traced % every:
            blocks = record.blocks_traced + record.blocks % every
            wanted.append(replace(record.request, blocks=blocks))
    there = [record.request for record in records]
    return [one for one in wanted if one not in there]


def check_request(records: Sequence[TraceRecord]) -> TraceRequest | None:
    """Return one more trace to check the computation with; None if everything was traced."""
    last = max(records, key=lambda one: one.blocks_traced)
    if not is_part(last) or not last.blocks_alike:
        return None
    every = depth.period(last.request.candidate)
    sizes = {record.request.candidate.micro_batch_size for record in records}
    size = 2 * max(sizes) if len(sizes) > 1 else max(sizes)
    return replace(
        last.request,
        blocks=min(last.blocks_traced + every, last.blocks),
        candidate=replace(_with_shards(records, None)[0].request.candidate, micro_batch_size=size),
        keep_log=False,
    )


def check_records(records: Sequence[TraceRecord], traced: TraceRecord) -> None:
    """Raise if a traced peak differs from the one computed from the other records."""
    candidate = traced.request.candidate
    usable = _usable(records)
    _, level = depth.highest(_levels(usable, candidate, blocks=traced.blocks_traced))
    off = depth.disagreement(round(level.peak_bytes), traced)
    if off > depth.TOLERANCE:
        raise Impossible(
            f"the memory of {traced.blocks_traced} blocks with micro-batches of "
            f"{candidate.micro_batch_size} differs by {off:.1%} from the value computed from "
            "smaller traces",
            why="the model's memory is not linear in its depth or its micro-batch size",
            fix="check it with real steps: muster plan --verify",
        )


def predict_memory(
    records: Sequence[TraceRecord],
    candidate: Candidate,
    *,
    hardware: Hardware,
    allocator: Kind | None = None,
    blocks: int | None = None,
) -> Memory:
    """Return what a rank of this candidate needs, from the records of its family.

    ``blocks`` is the depth (default: the model's own). ``allocator`` is torch's segment mode
    (default: the mode that ``muster train`` uses).
    """
    allocator = allocator or _segments(hardware)
    usable = _usable(records)
    first = usable[0]
    deep = first.blocks if blocks is None else blocks
    found = _levels(usable, candidate, blocks=deep)
    place, level = depth.highest(found)
    where = depth.as_peak(place, level, _with_shards(usable, None), blocks=deep)
    waiting = _waiting_inputs(usable, candidate)
    tensors = where.peak_bytes + waiting
    categories = {**where.by_category}
    categories["activations"] += waiting
    reserved = _reserved(usable, candidate, deep, allocator) if caches_memory(hardware) else None
    save = saving_memory(
        first.parameters,
        first.request.work,
        candidate,
        blocks=deep,
        ranks_per_machine=hardware.cards_per_machine,
    )
    terms = outside_allocator(candidate, hardware)
    middle, low, high = device_bytes(tensors, reserved, caches=caches_memory(hardware))
    return Memory(
        tensor_bytes=tensors,
        by_category=categories,
        where=where,
        reserved_bytes=reserved,
        outside=terms,
        total_bytes=middle + sum(term.size_bytes for term in terms),
        low_bytes=low + sum(term.low_bytes for term in terms),
        high_bytes=high + sum(term.high_bytes for term in terms),
        host_bytes=_host_bytes(usable, candidate, deep)
        * min(hardware.cards_per_machine, candidate.layout.ranks),
        save_host_bytes=save.host_bytes,
        save_bytes=save.checkpoint_bytes,
        origin=_origin(
            usable,
            candidate,
            deep,
            reserved,
            allocator=allocator if caches_memory(hardware) else None,
        ),
    )


def _usable(records: Sequence[TraceRecord]) -> list[TraceRecord]:
    """Return the records with the model's remainder of blocks, or of the whole model."""
    found = [
        record
        for record in records
        if not is_part(record)
        or (record.blocks - record.blocks_traced) % depth.period(record.request.candidate) == 0
    ]
    if not found:
        raise Impossible(
            "there is no trace from which to compute the memory",
            why=f"none of {len(records)} traces has the block structure of the whole model",
            fix="also trace the requests of further_requests()",
        )
    return found


def _with_shards(records: Sequence[TraceRecord], shards: int | None) -> list[TraceRecord]:
    """Return the records with this number of shards; None: with the fewest."""
    degrees = [record.request.candidate.layout.shards for record in records]
    wanted = min(degrees) if shards is None else shards
    return [record for record, degree in zip(records, degrees, strict=True) if degree == wanted]


def _levels(
    records: Sequence[TraceRecord], candidate: Candidate, *, blocks: int
) -> Mapping[DepthPlace, Level]:
    size, shards = candidate.micro_batch_size, candidate.layout.shards
    few = _with_shards(records, None)
    found = depth.at_depth(few, blocks=blocks, micro_batch_size=size)
    traced = few[0].request.candidate.layout.shards
    if candidate.strategy != "fsdp" or shards == traced:
        return found
    many = _with_shards(records, shard_degree.LARGE)
    if traced != shard_degree.SMALL or not many:
        raise Impossible(
            f"the memory of {shards} shards cannot be computed from a trace of {traced}",
            why=f"traces of {shard_degree.SMALL} and {shard_degree.LARGE} shards are needed",
            fix="trace the requests of trace_requests()",
        )
    # A sample adds the same with any number of shards, so these traces need only one size.
    smallest = min(one.request.candidate.micro_batch_size for one in many)
    low = depth.at_depth(few, blocks=blocks, micro_batch_size=smallest)
    high = depth.at_depth(many, blocks=blocks, micro_batch_size=smallest)
    moved = shard_degree.at_degree(low, high, few[0], shards=shards, blocks=blocks)
    return {
        place: found[place].plus(low[place], -1.0).plus(moved[place], 1.0)
        for place in found
        if place in moved
    }


def _over_depth(
    records: Sequence[TraceRecord], blocks: int, of: Callable[[TraceRecord], float]
) -> float:
    """Return a figure that grows with each block at another depth."""
    by_depth = {record.blocks_traced: of(record) for record in records}
    low, *others = sorted(by_depth)
    if not others or blocks == low:
        return by_depth[low]
    slope = (by_depth[others[0]] - by_depth[low]) / (others[0] - low)
    return by_depth[low] + slope * (blocks - low)


def _host_bytes(records: Sequence[TraceRecord], candidate: Candidate, blocks: int) -> int:
    """Return the host memory of a rank: its states, in proportion to its shards."""
    few = _with_shards(records, None)
    host = _over_depth(few, blocks, lambda record: record.host_bytes)
    traced = few[0].request.candidate.layout.shards
    shapes = few[0].parameters
    wanted = shard_degree.shard_elements(shapes, candidate.layout.shards, blocks=blocks)
    return round(host * wanted / shard_degree.shard_elements(shapes, traced, blocks=blocks))


def _waiting_inputs(records: Sequence[TraceRecord], candidate: Candidate) -> int:
    """Return the memory of inputs of further micro-batches: a whole step's stay on the device.

    At the update nothing else is left of a sample, so traces of two micro-batch sizes show it. A
    single trace shows what a forward created and is still alive: the inputs, and a little more.
    """
    few = _with_shards(records, None)
    traced = few[0].request.candidate.accumulation
    if candidate.accumulation <= traced:
        return 0
    by_size = {
        record.request.candidate.micro_batch_size: max(
            (
                peak.by_category.get("activations", 0)
                for peak in record.peaks
                if peak.phase == "update"
            ),
            default=0,
        )
        for record in few
        if record.blocks_traced == few[0].blocks_traced
    }
    low, *others = sorted(by_size)
    if others:
        of_sample = (by_size[others[0]] - by_size[low]) / (others[0] - low) / traced
    else:
        of_sample = by_size[low] / low / traced
    more = candidate.accumulation - traced
    return max(round(more * of_sample * candidate.micro_batch_size), 0)


def _reserved(
    records: Sequence[TraceRecord], candidate: Candidate, blocks: int, kind: Kind
) -> int | None:
    """Return what the allocator reserves; None without logs, or if the log cannot be extended."""
    size = candidate.micro_batch_size
    logged = [
        record
        for record in records
        if record.log is not None and record.request.candidate.micro_batch_size == size
    ]
    try:
        events = log_depth.log_of_depth(logged, blocks=blocks, shards=candidate.layout.shards)
    except (log_depth.Unlike, OSError):  # or the log was deleted since
        return None
    return simulate(events, kind).peak_bytes


def _origin(
    records: Sequence[TraceRecord],
    candidate: Candidate,
    blocks: int,
    reserved: int | None,
    *,
    allocator: Kind | None,
) -> str:
    depths = sorted({record.blocks_traced for record in records})
    traced = " and ".join(map(str, depths))
    words = f"tensors: traced with {traced} of {records[0].blocks} blocks"
    if blocks not in depths:
        words += f", computed for {blocks}"
    if allocator is None:
        return words
    if reserved is None:
        return f"{words}; {USUAL_ALLOCATOR}"
    return f"{words}; the allocator: simulated over all allocations, with {allocator} segments"


def _segments(hardware: Hardware) -> Kind:
    """Return torch's segment mode: ``muster train`` uses expandable segments on CUDA."""
    return "expandable" if hardware.card.kind == "cuda" else "classic"


def caches_memory(hardware: Hardware) -> bool:
    """Return whether PyTorch caches freed memory on such a device."""
    return hardware.card.kind in _CACHING


def device_bytes(tensors: int, reserved: int | None, *, caches: bool) -> tuple[int, int, int]:
    """Return device memory for tensors: expected, lowest and highest.

    ``reserved`` is what the allocator reserves for them, if it was simulated.
    """
    if not caches:
        return tensors, tensors, round(tensors * _SIMULATED_HIGH)
    if reserved is None:
        return round(tensors * _RESERVED_GUESS), tensors, round(tensors * _RESERVED_GUESS_HIGH)
    return reserved, tensors, round(reserved * _SIMULATED_HIGH)
