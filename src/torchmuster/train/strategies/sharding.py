"""FSDP's sharding options: what is sharded, and over which ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.decision import Decision
from torchmuster.errors import Impossible

Kind = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The sharding kind, with FSDP's names.

    ``full_shard``: parameters, gradients and optimizer states. ``shard_grad_op``: parameters stay
    whole between forward and backward, which saves communication and costs memory.
    ``hybrid_shard``: like full_shard among ``shard_size`` ranks (default: the ranks of one host),
    and replicated across these groups. ``no_shard`` is ddp.
    """

    kind: Kind = "full_shard"
    shard_size: int | None = None
    cpu_offload: bool = False  # shards are in host memory, and the optimizer runs there


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The number of model copies, and the number of ranks each is sharded over."""

    copies: int
    shards: int

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.copies * self.shards


def choose_layout(sharding: Sharding, *, ranks_of_machines: Sequence[int]) -> Decision[ShardLayout]:
    """Return the layout of shards, given the number of ranks on each host."""
    ranks = sum(ranks_of_machines)
    if sharding.kind != "hybrid_shard":
        if sharding.shard_size is not None:
            raise Impossible(
                f"a shard size of {sharding.shard_size} ranks was requested with {sharding.kind}",
                why=f"{sharding.kind} shards over all {ranks} ranks",
                fix="remove the shard size, or use hybrid_shard",
            )
        return Decision(
            value=ShardLayout(copies=1, shards=ranks),
            reason=f"{sharding.kind}: one copy of the model, sharded over all {ranks} ranks",
        )
    shards = sharding.shard_size
    if shards is None:
        shards = _ranks_of_each(ranks_of_machines)
    if shards < 1 or ranks % shards:
        raise Impossible(
            f"a shard size of {shards} ranks was requested",
            why=f"there are {ranks} ranks, which is not a multiple of {shards}",
            fix=f"use a shard size that divides {ranks}, or full_shard",
        )
    layout = ShardLayout(copies=ranks // shards, shards=shards)
    return Decision(value=layout, reason=f"hybrid_shard: {_layout_text(layout)}")


def _ranks_of_each(ranks_of_machines: Sequence[int]) -> int:
    sizes = sorted(set(ranks_of_machines))
    if len(sizes) > 1:
        raise Impossible(
            "hybrid_shard was requested, which shards within each host",
            why=f"the hosts have different numbers of ranks: {', '.join(map(str, sizes))}",
            fix="give each host the same number of ranks, set a shard size that divides their "
            "sum, or use full_shard",
        )
    return sizes[0]


def _layout_text(layout: ShardLayout) -> str:
    if layout.copies == 1:
        return (
            f"all {layout.shards} ranks hold one copy, so there is nothing to replicate: the same as "
            "full_shard"
        )
    if layout.shards == 1:
        return (
            f"each of {layout.copies} ranks holds a whole copy, so nothing is sharded: ddp does the "
            "same with less communication"
        )
    return f"{layout.copies} copies, each sharded over {layout.shards} ranks"
