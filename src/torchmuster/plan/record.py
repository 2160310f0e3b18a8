"""The record of traced training steps: plain values, written by the probe and read without torch.

Sizes are for rank 0, which has the largest shards. A *block* is one of the model's repeated layers.
Every figure is recorded with its block, so that other depths can be computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from torchmuster.plan.job import Candidate, Work

Category: TypeAlias = Literal[
    "parameters", "gradients", "optimizer", "activations", "logits", "collectives"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
# The phases of a step, in this order. Forward, loss and backward occur once per micro-batch.
PhaseName: TypeAlias = Literal["forward", "loss", "backward", "check", "update"]
# A step costs its first micro-batches, the last one (which reduces gradients) and the update.
Part: TypeAlias = Literal["first", "last", "update"]


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """A request for a trace of a step."""

    work: Work
    candidate: Candidate
    blocks: int | None = None  # number of the model's repeated layers to use; None: all
    kernels: Literal["cpu", "cuda"] = "cpu"  # which device's operations, such as fused norms
    steps: bool = True  # False: only the parameters, without peaks and costs


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of live tensor memory in one stage of a step."""

    phase: PhaseName
    micro_batch: int  # counted from 0; 0 in check and update
    block: int | None  # from the entry into this block to that into the next; None: before it
    peak_bytes: int
    by_category: Mapping[str, int]  # at that moment


@dataclass(kw_only=True)
class Cost:
    """The work of one part of a step; a trace adds to it."""

    operations: int = 0
    flops: dict[str, int] = field(default_factory=dict)  # of matrix products, by dtype
    moved_bytes: int = 0  # read and written by all other operations
    # Sent bytes of collectives, among the ranks of a group of shards or of copies. A gather counts
    # its result, a reduction its input, an all-reduce its input twice.
    sent_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A parameter, for arithmetic over shards."""

    shape: tuple[int, ...]
    dtype: str
    block: int | None  # the block that it belongs to


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """A trace of a training step, as all after the first are."""

    request: TraceRequest
    blocks_traced: int
    blocks: int  # of the whole model
    parameters: tuple[Shape, ...]  # of the traced model, each once
    parameter_count: int  # of the whole model
    trained_count: int
    input_bytes: int  # of one micro-batch
    host_bytes: int  # host memory of cpu_offload, for this rank
    peaks: tuple[Peak, ...]
    costs: Mapping[Part, Cost]

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes in a step."""
        return max(peak.peak_bytes for peak in self.peaks)
