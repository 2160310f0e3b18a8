"""The record of a trace of training steps: plain values, written by the probe, read without torch.

Sizes are for the traced rank (rank 0), which has the largest shards. A *block* is one of the
model's repeated layers; everything is recorded with its block, to compute other depths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchmuster.plan.job import Candidate, Work

Category: TypeAlias = Literal[
    "parameters", "gradients", "optimizer", "activations", "logits", "collectives", "temporaries"
]
CATEGORIES: tuple[Category, ...] = (
    *("parameters", "gradients", "optimizer", "activations", "logits", "collectives"),
    "temporaries",
)
# The phases of a step, in this order; forward, backward and recompute occur per micro-batch.
PhaseName: TypeAlias = Literal["forward", "loss", "backward", "check", "update"]


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """A request for a trace."""

    work: Work
    candidate: Candidate
    blocks: int | None = None  # number of the model's repeated layers to use; None: all
    kernels: Literal["cpu", "cuda"] = "cpu"  # which device's operations, such as fused norms
    keep_log: bool = False  # also the log of all allocations, to simulate the allocator


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of live memory in one part of a step."""

    phase: PhaseName
    micro_batch: int  # counted from 0; 0 in check and update
    block: int | None  # None: what lies before, between and after the blocks
    after_block: int | None  # where block is None: the block before it in time; None: the beginning
    peak_bytes: int
    by_category: Mapping[str, int]  # at that moment
    operation: str  # that caused the peak
    module: str  # in which it happened


@dataclass(frozen=True, kw_only=True)
class TracedOperation:
    """Operations of one kind in one section, added up."""

    name: str  # aten.mm
    dtype: str  # of its result: float32, bfloat16
    count: int
    flops: int
    moved_bytes: int  # read and written
    made_bytes: int = 0  # of results that are new tensors, without in-place writes


@dataclass(frozen=True, kw_only=True)
class TracedCollective:
    """One collective, at its launch."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    ranks: int
    between_copies: bool  # hybrid sharding: over copies instead of shards
    moved_bytes: int  # the whole result of a gather, the whole input of a reduction
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A section between two collectives or borders of blocks, in the order of the step."""

    phase: PhaseName
    micro_batch: int
    block: int | None
    operations: tuple[TracedOperation, ...] = ()
    collective: TracedCollective | None = None  # then there are no operations
    recomputed: bool = False  # a forward that is recomputed in the backward


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One event of the log: an allocation, a free, or a border between parts of the step."""

    kind: Literal["take", "give", "mark"]
    number: int = 0  # of the storage
    size_bytes: int = 0
    stream: Literal["compute", "gather", "reduce"] = "compute"
    category: str = ""
    mark: str = ""  # phase, micro-batch, block: "forward 0 3"; "step 1"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A parameter, for arithmetic over shards."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    block: int | None  # the block that it belongs to
    copies: int = (
        1  # how many blocks of the whole model have one of this shape, where it is a block's
    )


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """A trace of two training steps of rank 0."""

    request: TraceRequest
    torch: str
    blocks_traced: int
    blocks: int  # of the whole model
    blocks_alike: bool  # all have the same parameter shapes: other depths can be computed
    parameters: tuple[Shape, ...]  # of the traced model, each once
    parameter_count: int  # of the whole model
    trained_count: int
    samples_per_micro_batch: int
    tokens_per_sample: int | None
    states: Mapping[str, int]  # parameters, gradients, optimizer, buffers: between steps
    first_step_peak_bytes: int
    peaks: tuple[Peak, ...]  # of the second step, the steady state
    timeline: tuple[Stretch, ...]  # of the second step
    host_bytes: int  # host memory of cpu_offload, for this rank
    log: str | None = None  # file with the allocations, JSON lines
    took_s: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes in a step."""
        return max(one.peak_bytes for one in self.peaks)
