"""What micro-batches of each size really take, all of them tried one after the other in one group of ranks."""

import gc
from collections.abc import Sequence

from live_bytes import live_bytes
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.build_step import build_step
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.train.world import World


def candidate_for(strategy: str, ranks: int, micro_batch_size: int = 1) -> Candidate:
    """Return a way to train on so many ranks."""
    copies, shards = (ranks, 1) if strategy == "ddp" else (1, ranks)
    return Candidate(
        strategy=strategy,  # type: ignore[arg-type]
        layout=ShardLayout(copies=copies, shards=shards),
        micro_batch_size=micro_batch_size,
    )


def peaks(
    world: World, work: Work, strategy: str, sizes: Sequence[int], tries: int
) -> dict[int, int]:
    """Return the most that lived on this rank with micro-batches of each size: the least of so many tries."""
    _peak(world, work, strategy, sizes[0])  # the first one computes shapes that are kept
    return {size: min(_peak(world, work, strategy, size) for _ in range(tries)) for size in sizes}


def _peak(world: World, work: Work, strategy: str, size: int) -> int:
    with live_bytes() as seen:
        built = build_step(work, candidate_for(strategy, world.world_size, size), world)
        for number in range(3):
            built.train(number)
    del built
    gc.collect()
    return seen.peak
