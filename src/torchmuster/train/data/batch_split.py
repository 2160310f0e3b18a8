"""Split a global batch among the ranks.

A global batch is split into consecutive rounds, and each round into one slice per rank. Every
sample is in exactly one slice; all ranks have the same number of rounds, even at the end of an
epoch.
"""

from dataclasses import dataclass

from torchmuster.errors import Impossible


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The global batch size, and the micro-batch size that every rank has."""

    ranks: int
    global_batch_size: int
    micro_batch_size: int  # the maximum that a rank computes at once

    @property
    def rounds(self) -> int:
        """The number of micro-batches of each rank in a full step."""
        return self.rounds_for(self.global_batch_size)

    def rounds_for(self, samples: int) -> int:
        """Return how many rounds a step of N samples needs."""
        return -(-samples // (self.micro_batch_size * self.ranks))

    def slices(self, samples: int, rank: int) -> list[slice]:
        """Return the slices of a step's samples that a rank computes, by round; empty if idle.

        No rank is idle if there are enough samples for one per rank and round.
        """
        rounds = self.rounds_for(samples)
        slices = []
        for number in range(rounds):
            begin = samples * number // rounds
            size = samples * (number + 1) // rounds - begin
            start = begin + size * rank // self.ranks
            slices.append(slice(start, begin + size * (rank + 1) // self.ranks))
        return slices


def split_batch(
    ranks: int, *, global_batch_size: int | None = None, micro_batch_size: int | None = None
) -> BatchSplit:
    """Complete the given sizes: one micro-batch for each rank and step if one of them is missing."""
    for name, size in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", micro_batch_size),
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
        micro_batch_size = -(-global_batch_size // ranks)
    return BatchSplit(
        ranks=ranks,
        global_batch_size=global_batch_size or micro_batch_size * ranks,
        micro_batch_size=micro_batch_size,
    )
