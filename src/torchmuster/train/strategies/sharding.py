"""FSDP's sharding options: what is sharded, and over which ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchmuster.errors import Impossible

if TYPE_CHECKING:  # the command line imports this module, without torch
    from torchmuster.train.world import World

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


def lay_out(sharding: Sharding, world: "World") -> ShardLayout:
    """Return the layout of shards; refuse hosts with different numbers of ranks for hybrid_shard."""
    ranks = world.world_size
    if sharding.kind != "hybrid_shard":
        return ShardLayout(copies=1, shards=ranks)
    shards = sharding.shard_size or world.local_world_size
    if ranks % shards:
        raise Impossible(
            f"hybrid_shard cannot divide {ranks} ranks into groups of {shards}",
            why="each group, by default the ranks of one host, holds a copy of the model",
            fix="give each host the same number of ranks, or use full_shard",
        )
    return ShardLayout(copies=ranks // shards, shards=shards)
