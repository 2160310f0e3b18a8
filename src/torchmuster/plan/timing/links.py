"""How long a collective takes: a latency for each step of it, and its bytes over the slowest link.

The shape is that of NCCL's own model (src/graph/tuning.cc): rings for gathers and scatters, the sooner of a ring and
trees for sums. A ring that passes through several machines enters and leaves each of them once for every
card of the group there, and each card has its own way out: so the more cards of a group a machine has, the
faster the group is between machines.
"""

import math
from dataclasses import dataclass

from torchmuster.plan.hardware.model import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.record import Collective
from torchmuster.plan.timing.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Group:
    """Where the ranks of a group are."""

    ranks: int
    ranks_of_machine: int  # of this group, on each machine

    @property
    def machines(self) -> int:
        """How many machines it spreads over."""
        return math.ceil(self.ranks / self.ranks_of_machine)


def group_of(collective: Collective, candidate: Candidate, hardware: Hardware) -> Group:
    """Return where a collective's ranks are: shards are neighbours, copies as far apart as shards are many."""
    layout, each = candidate.layout, hardware.cards_per_machine
    if collective.between_copies:
        on_one = max(each // layout.shards, 1)
        return Group(ranks=layout.copies, ranks_of_machine=min(layout.copies, on_one))
    sharded = collective.kind in ("all_gather", "reduce_scatter")
    ranks = layout.shards if sharded else layout.ranks
    return Group(ranks=ranks, ranks_of_machine=min(ranks, each))


def seconds(
    kind: str, moved_bytes: float, group: Group, *, hardware: Hardware, rates: Rates
) -> float:
    """Return what a collective over ``moved_bytes`` takes: a gather's result, or a reduction's input."""
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


def _bytes_s(group: Group, hardware: Hardware) -> float:
    """Return what passes through the narrowest place of a ring."""
    ways = []
    if group.ranks_of_machine > 1:
        ways.append(hardware.within.bytes_s)
    if group.machines > 1:
        ways.append(hardware.between.bytes_s * group.ranks_of_machine)
    return min(ways)


def _latency_s(passes: int, group: Group, hardware: Hardware) -> float:
    near, far = hardware.within.latency_s, hardware.between.latency_s
    crossings = group.machines - 1
    ring = passes * ((group.ranks - 1 - crossings) * near + crossings * far)
    if passes == 1:
        return ring
    tree = 2 * ((group.ranks_of_machine - 1) * near + math.ceil(math.log2(group.machines)) * far)
    return min(ring, tree)
