"""How much memory a rank needs: from records of a few blocks to any depth, micro-batch and number of shards.

Three figures, each from another source: what tensors take at once (traced, then computed), what PyTorch's allocator keeps
for them (simulated), and what the device holds beside it (published figures).
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

WHOLE_ELEMENTS = 2**24  # of logits that the loss takes at once, as train/losses.py has it


def traced_sizes(
    work: Work, micro_batch_size: int, *, kernels: Literal["cpu", "cuda"]
) -> tuple[int, ...]:
    """Return one or two micro-batch sizes that say what this one takes."""
    if micro_batch_size == 1 or kernels == "cpu":
        return (micro_batch_size,)
    if not _loss_has_parts(work):
        return (2, 3)
    border = _largest_whole(work)
    if border is None:
        # What is not known may lie anywhere: between two near sizes it cannot do much harm.
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
    """Return the most samples whose loss is taken at once; None where that cannot be read."""
    told = model_configuration(work)
    vocabulary = None if told is None else told.get("vocab_size")
    if not isinstance(vocabulary, int) or work.sequence_length is None:
        return None
    return max(1, WHOLE_ELEMENTS // vocabulary) // work.sequence_length


# Of what tensors take, where no log was there to simulate the allocator with: published runs reserve a fifth more.
_RESERVED_GUESS = 1.2
_RESERVED_GUESS_HIGH = 1.3
USUAL_ALLOCATOR = "the allocator: a fifth more, as published runs have"
# Simulated over two published runs it was 3 and 4 % too low.
_SIMULATED_HIGH = 1.05
_CACHING = ("cuda", "rocm", "xpu")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one rank needs; ``host`` and ``save`` bytes are those of one machine or of the whole checkpoint."""

    tensor_bytes: int  # the most that tensors take at once
    by_category: Mapping[str, int]  # at that moment
    where: Peak | None  # None: computed by a formula
    reserved_bytes: int | None  # what the allocator keeps for it; None: not simulated
    outside: tuple[DeviceTerm, ...]
    total_bytes: int  # of the device
    low_bytes: int
    high_bytes: int
    host_bytes: int  # of one machine: what cpu_offload keeps there
    save_host_bytes: int  # of one machine: copies while a save goes on beside the training
    save_bytes: int  # of one checkpoint, on the disk
    origin: str  # how all this was found


def trace_family(
    candidate: Candidate, work: Work, *, kernels: Literal["cpu", "cuda"] = "cuda"
) -> Candidate:
    """Return the candidate whose traces serve this one: sizes that can be computed are left out of it."""
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
    """Return what must be traced to know the memory of a candidate, and of all others of its family.

    Two depths and up to two micro-batch sizes; where shards are too many to be traced, also both depths with 64. With
    ``keep_log`` the micro-batch has the candidate's own size, and the records also say what the allocator keeps: that
    is for the few candidates that matter.
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
    """Return what must be traced besides, now that the model's depth is known: nothing for most.

    Where every n-th block is recomputed and the blocks are no multiple of n, the traces need the same remainder.
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
    """Return one more trace that must agree with what is computed from these; None where all was traced."""
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
    """Raise if a traced peak is not what is computed for it from the other records."""
    candidate = traced.request.candidate
    usable = _usable(records)
    _, level = depth.highest(_levels(usable, candidate, blocks=traced.blocks_traced))
    off = depth.disagreement(round(level.peak_bytes), traced)
    if off > depth.TOLERANCE:
        raise Impossible(
            f"the memory of {traced.blocks_traced} blocks with micro-batches of "
            f"{candidate.micro_batch_size} is not what smaller ones say: it differs by {off:.1%}",
            why="the model's memory is no straight line over its depth or its micro-batch size",
            fix="try it with real steps: muster plan --verify",
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

    ``blocks`` is the depth, where it is not the model's own. ``allocator`` is how torch's takes segments, where it is
    not as ``muster train`` has it.
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
    """Return the records that have the model's remainder of blocks, or are of the whole model."""
    found = [
        record
        for record in records
        if not is_part(record)
        or (record.blocks - record.blocks_traced) % depth.period(record.request.candidate) == 0
    ]
    if not found:
        raise Impossible(
            "there is no trace to compute memory from",
            why=f"of {len(records)} traces, none has blocks that repeat as the whole model's do",
            fix="trace what further() asks for as well",
        )
    return found


def _with_shards(records: Sequence[TraceRecord], shards: int | None) -> list[TraceRecord]:
    """Return the records with so many shards; None: with the fewest."""
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
            why=f"it takes traces of {shard_degree.SMALL} and {shard_degree.LARGE} shards",
            fix="trace what requests() asks for",
        )
    # A sample adds the same with any number of shards, so these traces need one micro-batch size.
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
    """Return what a figure that grows with each block is at another depth."""
    by_depth = {record.blocks_traced: of(record) for record in records}
    low, *others = sorted(by_depth)
    if not others or blocks == low:
        return by_depth[low]
    slope = (by_depth[others[0]] - by_depth[low]) / (others[0] - low)
    return by_depth[low] + slope * (blocks - low)


def _host_bytes(records: Sequence[TraceRecord], candidate: Candidate, blocks: int) -> int:
    """Return what a rank keeps in the host's memory: states, so in proportion to its shards."""
    few = _with_shards(records, None)
    host = _over_depth(few, blocks, lambda record: record.host_bytes)
    traced = few[0].request.candidate.layout.shards
    shapes = few[0].parameters
    wanted = shard_degree.shard_elements(shapes, candidate.layout.shards, blocks=blocks)
    return round(host * wanted / shard_degree.shard_elements(shapes, traced, blocks=blocks))


def _waiting_inputs(records: Sequence[TraceRecord], candidate: Candidate) -> int:
    """Return what the inputs of further micro-batches take: those of a whole step stay on the device.

    At the update nothing else is left of a sample, so the traces of two micro-batch sizes show it there. One alone shows
    what was made in a forward and is still there: the inputs, and a little more.
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
    """Return what the allocator keeps; None without logs, or where no log of that depth can be made."""
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
    """Return how torch's allocator takes segments: ``muster train`` lets those of CUDA grow."""
    return "expandable" if hardware.card.kind == "cuda" else "classic"


def caches_memory(hardware: Hardware) -> bool:
    """Say whether PyTorch keeps what was freed on such a card for itself."""
    return hardware.card.kind in _CACHING


def device_bytes(tensors: int, reserved: int | None, *, caches: bool) -> tuple[int, int, int]:
    """Return what tensors take of the device: likely, at least and at most.

    ``reserved`` is what the allocator keeps for them, where it was simulated.
    """
    if not caches:
        return tensors, tensors, round(tensors * _SIMULATED_HIGH)
    if reserved is None:
        return round(tensors * _RESERVED_GUESS), tensors, round(tensors * _RESERVED_GUESS_HIGH)
    return reserved, tensors, round(reserved * _SIMULATED_HIGH)
