"""The order of a stream's samples, and whose they are. Pure: counts in, order out.

In a *lap* every lane gives one block of samples, shuffled by (seed, epoch, lane, lap). The lap's order
takes one sample from each lane in turn; a lane that has no more drops out. Batches are cut from lap
after lap. Nothing of this depends on the number of ranks: a rank owns some of the lanes, and computes
their samples.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

from torchmuster.train.seeds import derive

T = TypeVar("T")


def owners(lanes: int, weights: Sequence[int]) -> list[int]:
    """Return the rank that owns each lane: in turn, and more often the higher a rank's weight is."""
    total = sum(weights)
    owned = [0] * len(weights)
    result = []
    for lane in range(lanes):
        rank = max(
            range(len(weights)),
            key=lambda one: (weights[one] * (lane + 1) - owned[one] * total, -one),
        )
        owned[rank] += 1
        result.append(rank)
    return result


def lap_order(counts: Sequence[int]) -> list[int]:
    """Return the lane of each place of a lap, given how many samples each lane has in it."""
    return [
        lane
        for turn in range(max(counts, default=0))
        for lane, count in enumerate(counts)
        if count > turn
    ]


def shuffled(block: list[T], seed: int, epoch: int, lane: int, lap: int) -> list[T]:
    """Return a lane's block of a lap in its own order."""
    mixed = list(block)
    random.Random(derive(seed, "block", epoch, lane, lap)).shuffle(mixed)
    return mixed


def rounds(own_samples: Sequence[int], micro_batch_sizes: Sequence[int]) -> int:
    """Return how many micro-batches each rank computes for a step: as many as the fullest one needs."""
    return max(-(-own // size) for own, size in zip(own_samples, micro_batch_sizes, strict=True))
