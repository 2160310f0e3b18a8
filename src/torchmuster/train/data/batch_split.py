"""Split a global batch among the ranks.

A global batch is split into consecutive rounds, and each round into one slice per rank. Every
sample is in exactly one slice; all ranks have the same number of rounds, even at the end of an
epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from torchmuster.decision import Decision
from torchmuster.errors import Impossible


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The global batch size, and each rank's micro-batch size."""

    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]  # the maximum that each rank computes at once

    @cached_property
    def rounds(self) -> int:
        """The number of micro-batches of each rank in a full step."""
        return self.rounds_for(self.global_batch_size)

    def rounds_for(self, samples: int) -> int:
        """Return how many rounds a step of N samples needs."""
        return -(-samples // sum(self.micro_batch_sizes))

    def slices(self, samples: int, rank: int) -> list[slice]:
        """Return the slices of a step's samples that a rank computes, by round; empty if idle.

        No rank is idle if there are enough samples for one per rank and round.
        """
        if not samples:
            return []
        edges = accumulate(_evenly(samples, self.rounds_for(samples)), initial=0)
        return [self._slice(begin, end, rank) for begin, end in pairwise(edges)]

    def _slice(self, begin: int, end: int, rank: int) -> slice:
        shares = _one_each_first(end - begin, self.micro_batch_sizes)
        start = begin + sum(shares[:rank])
        return slice(start, start + shares[rank])


def split_batch(
    ranks: int,
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    accumulation: int | None = None,
) -> BatchSplit:
    """Complete the given sizes: micro-batch sizes x accumulation = global batch size."""
    if micro_batch_size is not None and micro_batch_sizes is not None:
        raise Impossible(
            "micro_batch_size and micro_batch_sizes were both given",
            why="micro_batch_size applies to all ranks, micro_batch_sizes gives each rank its own size",
            fix="give only one of them",
        )
    if micro_batch_size is not None:
        micro_batch_sizes = (micro_batch_size,) * ranks
    for name, sizes in (
        ("global_batch_size", [global_batch_size]),
        ("the micro-batch size", micro_batch_sizes or []),
        ("accumulation", [accumulation]),
    ):
        if any(size is not None and size < 1 for size in sizes):
            raise Impossible(
                f"{name} is {', '.join(map(str, sizes))}", fix="give integers of at least 1"
            )
    if micro_batch_sizes is None:
        if global_batch_size is None:
            raise Impossible(
                "no batch size was given",
                why="global_batch_size is the number of samples in a step over all ranks, and "
                "micro_batch_size "
                "is the number that a rank computes at once",
                fix="give global_batch_size=…, micro_batch_size=… or both",
            )
        micro_batch_sizes = (-(-global_batch_size // (ranks * (accumulation or 1))),) * ranks
    if len(micro_batch_sizes) != ranks:
        raise Impossible(
            f"{len(micro_batch_sizes)} micro-batch sizes were given for {ranks} ranks: "
            f"{', '.join(map(str, micro_batch_sizes))}",
            fix=f"give one size for each rank, {ranks} in total",
        )
    at_once = sum(micro_batch_sizes)
    portions = BatchSplit(
        global_batch_size=global_batch_size or at_once * (accumulation or 1),
        micro_batch_sizes=tuple(micro_batch_sizes),
    )
    if accumulation is not None and portions.rounds != accumulation:
        raise Impossible(
            f"a global batch of {portions.global_batch_size} does not match accumulation "
            f"{accumulation}",
            why=f"all ranks together compute {at_once} samples at once, so a step takes "
            f"{portions.rounds} rounds",
            fix="remove accumulation, or one of the sizes",
        )
    return portions


def proportional_sizes(total: int, weights: Sequence[float]) -> list[int]:
    """Divide an integer by weights; the rest after rounding down goes to the largest remainders."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [int(one) for one in exact]
    by_remainder = sorted(range(len(weights)), key=lambda place: shares[place] - exact[place])
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares


def propose_micro_batch_sizes(
    total: int, weights: Sequence[float], names: Sequence[str], *, measured: str = "speed"
) -> Decision[tuple[int, ...]]:
    """Divide ``total`` samples per round among devices, by their measured speed or memory.

    Each rank gets at least one sample.
    """
    if total < len(weights) or min(weights) <= 0:
        raise Impossible(
            f"cannot divide {total} samples among {len(weights)} ranks by {measured}",
            why="each rank needs at least one sample and a measured value above 0",
            fix=f"give at least {len(weights)} samples per round",
        )
    rest = proportional_sizes(
        total - len(weights), [max(0.0, one) for one in _beyond_one(total, weights)]
    )
    sizes = tuple(1 + share for share in rest)
    best = max(weights)
    if min(weights) == best:
        reason = f"every rank gets {_of(sizes[0], total)}: all have the same {measured}"
    else:
        reason = "; ".join(
            f"rank {rank} ({names[rank]}) gets {_of(sizes[rank], total)}: "
            f"it has {_fraction(weight / best)} of the {measured}"
            for rank, weight in enumerate(weights)
            if weight < best
        )
    return Decision(value=sizes, reason=reason)


def _beyond_one(total: int, weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    return [total * weight / whole - 1 for weight in weights]


def _of(size: int, total: int) -> str:
    return f"{size} of {total} samples"


def _fraction(part: float) -> str:
    """Format 0.25 as 1/4 and 0.4 as 40 %."""
    for below in range(2, 10):
        if abs(part * below - 1) < 0.02:
            return f"1/{below}"
    return f"{part:.0%}".replace("%", " %")


def _evenly(total: int, parts: int) -> list[int]:
    each, left = divmod(total, parts)
    return [each + (place < left) for place in range(parts)]


def _one_each_first(samples: int, sizes: Sequence[int]) -> list[int]:
    """Split a round: one sample for each rank, because an idle rank computes too; then by size."""
    if samples >= len(sizes):
        rest = proportional_sizes(samples - len(sizes), [size - 1 for size in sizes])
        return [1 + share for share in rest]
    largest = sorted(range(len(sizes)), key=lambda rank: -sizes[rank])[:samples]
    return [int(rank in largest) for rank in range(len(sizes))]
