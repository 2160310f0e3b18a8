"""The shares of the peak rates of GPUs and links that training reaches, with their sources."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.plan.hardware.catalogue import Hardware, Link
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import TracedCollective


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of the peak rates, one number each; measured values where available."""

    compute: float  # of the rate of matrix products
    memory: float  # of the memory bandwidth, for everything that is not limited by compute
    communication: float  # of a link's rate
    operation_s: float  # launch time of one operation
    # The same on a sharded tensor, as in the update of fsdp: DTensor first computes the placement.
    sharded_operation_s: float
    # Rate of new memory from the system; None: freed memory stays with the program, as on GPUs.
    new_memory_bytes_s: float | None = None
    # Operations that are far slower than memory, by name: bytes written per second.
    slow_operations: Mapping[str, float] = field(default_factory=dict)
    beside: bool  # whether collectives overlap with compute, or block it
    # Share of the rates of fsdp's collectives that is left during compute.
    sharded_communication: float = 1.0
    # Measured collectives, by "kind ranks": over the bytes of a gather's result or a reduction's
    # input.
    collectives: Mapping[str, Link] = field(default_factory=dict)
    # With cpu_offload: between a GPU and its host, and a GPU's share of host memory in the update.
    host_link_bytes_s: float = 20e9
    host_memory_bytes_s: float = 15e9
    source: str

    def measured(self, kind: str, ranks: int) -> Link | None:
        """Return the measurement of one kind of collective with this number of ranks."""
        return self.collectives.get(rate_key(kind, ranks))


def rate_key(kind: str, ranks: int) -> str:
    """Return the key of a measured collective."""
    return f"{kind} {ranks}"


# The best matrix products reach 80 % (H100, H200) and 78 % (B200) of the vendors' peak (measured by
# ml-engineering, insights/when-to-upgrade-gpus); those of trainings less. Chosen values: two thirds
# of the peak, 80 % of the bandwidth for streaming operations, 80 % of a link for NCCL, and 6 us to
# launch an operation in eager mode. benchmarks/results/plan-published.md compares them with trainings.
PUBLISHED_SPREAD = 0.55, 1.31
CATALOGUED = Rates(
    compute=0.66,
    memory=0.8,
    communication=0.8,
    operation_s=6e-6,
    sharded_operation_s=6e-6,  # one operation covers all parameters: there are few
    beside=True,
    source="typical shares of the vendor's rates, not measured",
)
ON_CPU = Rates(
    compute=0.8,
    memory=0.8,
    communication=1.0,
    operation_s=5e-6,
    sharded_operation_s=4e-5,
    new_memory_bytes_s=2.5e9,
    beside=False,
    source="typical shares of a CPU's rates, not measured",
)


def usual_rates(kind: str) -> Rates:
    """Return the typical (not measured) rates for a kind of device."""
    return ON_CPU if kind == "cpu" else CATALOGUED


@dataclass(frozen=True, kw_only=True)
class LinkGroup:
    """The placement of a group's ranks on machines."""

    ranks: int
    ranks_of_machine: int  # of this group, on each machine

    @property
    def machines(self) -> int:
        """The number of machines it spans."""
        return math.ceil(self.ranks / self.ranks_of_machine)


def link_group(collective: TracedCollective, candidate: Candidate, hardware: Hardware) -> LinkGroup:
    """Return the placement of a collective's ranks: shards are adjacent, copies are not."""
    layout, each = candidate.layout, hardware.cards_per_machine
    if collective.between_copies:
        on_one = max(each // layout.shards, 1)
        return LinkGroup(ranks=layout.copies, ranks_of_machine=min(layout.copies, on_one))
    sharded = collective.kind in ("all_gather", "reduce_scatter")
    ranks = layout.shards if sharded else layout.ranks
    return LinkGroup(ranks=ranks, ranks_of_machine=min(ranks, each))


def transfer_seconds(
    kind: str, moved_bytes: float, group: LinkGroup, *, hardware: Hardware, rates: Rates
) -> float:
    """Return the seconds of a collective over ``moved_bytes`` (gather result, reduction input)."""
    if group.ranks < 2:
        return 0.0
    measured = rates.measured(kind, group.ranks)
    if measured is not None and group.machines == 1:
        return measured.latency_s + moved_bytes / measured.bytes_s
    passes = 2 if kind == "all_reduce" else 1
    carried = moved_bytes * passes * (1.0 if kind == "broadcast" else 1.0 - 1.0 / group.ranks)
    return _latency_s(passes, group, hardware) + carried / (
        rates.communication * _bytes_s(group, hardware)
    )


def _bytes_s(group: LinkGroup, hardware: Hardware) -> float:
    """Return the rate of a ring's bottleneck."""
    ways = []
    if group.ranks_of_machine > 1:
        ways.append(hardware.within.bytes_s)
    if group.machines > 1:
        ways.append(hardware.between.bytes_s * group.ranks_of_machine)
    return min(ways)


def _latency_s(passes: int, group: LinkGroup, hardware: Hardware) -> float:
    near, far = hardware.within.latency_s, hardware.between.latency_s
    crossings = group.machines - 1
    ring = passes * ((group.ranks - 1 - crossings) * near + crossings * far)
    if passes == 1:
        return ring
    tree = 2 * ((group.ranks_of_machine - 1) * near + math.ceil(math.log2(group.machines)) * far)
    return min(ring, tree)
