"""Split a global batch among the ranks.

A global batch is split into consecutive rounds, and each round into one slice per rank. Every
sample is in exactly one slice; all ranks have the same number of rounds, even at the end of an
epoch.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from torchmuster.errors import Impossible


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The global batch size, and the micro-batch size that every rank has."""

    ranks: int
    global_batch_size: int
    micro_batch_size: int  # the maximum that a rank computes at once

    @property
    def samples_at_once(self) -> int:
        """The maximum number of samples that all ranks together compute at once."""
        return self.micro_batch_size * self.ranks

    @cached_property
    def rounds(self) -> int:
        """The number of micro-batches of each rank in a full step."""
        return self.rounds_for(self.global_batch_size)

    def rounds_for(self, samples: int) -> int:
        """Return how many rounds a step of N samples needs."""
        return -(-samples // self.samples_at_once)

    def slices(self, samples: int, rank: int) -> list[slice]:
        """Return the slices of a step's samples that a rank computes, by round; empty if idle.

        No rank is idle if there are enough samples for one per rank and round.
        """
        if not samples:
            return []
        edges = accumulate(_evenly(samples, self.rounds_for(samples)), initial=0)
        return [self._slice(begin, end, rank) for begin, end in pairwise(edges)]

    def _slice(self, begin: int, end: int, rank: int) -> slice:
        shares = _evenly(end - begin, self.ranks)
        start = begin + sum(shares[:rank])
        return slice(start, start + shares[rank])


def split_batch(
    ranks: int,
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
) -> BatchSplit:
    """Complete the given sizes: ranks x micro-batch size x accumulation = global batch size."""
    for name, size in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", micro_batch_size),
        ("accumulation", accumulation),
    ):
        if size is not None and size < 1:
            raise Impossible(f"{name} is {size}", fix="give an integer of at least 1")
    if micro_batch_size is None:
        if global_batch_size is None:
            raise Impossible(
                "no batch size was given",
                why="global_batch_size is the number of samples in a step over all ranks, and "
                "micro_batch_size is the number that a rank computes at once",
                fix="give global_batch_size=…, micro_batch_size=… or both",
            )
        micro_batch_size = -(-global_batch_size // (ranks * (accumulation or 1)))
    samples_at_once = micro_batch_size * ranks
    portions = BatchSplit(
        ranks=ranks,
        global_batch_size=global_batch_size or samples_at_once * (accumulation or 1),
        micro_batch_size=micro_batch_size,
    )
    if accumulation is not None and portions.rounds != accumulation:
        raise Impossible(
            f"a global batch of {portions.global_batch_size} does not match accumulation "
            f"{accumulation}",
            why=f"all ranks together compute {samples_at_once} samples at once, so a step takes "
            f"{portions.rounds} rounds",
            fix="remove accumulation, or one of the sizes",
        )
    return portions


def _evenly(total: int, parts: int) -> list[int]:
    """Split an integer into parts that differ by at most 1, the larger ones first."""
    size, left = divmod(total, parts)
    return [size + (part < left) for part in range(parts)]
