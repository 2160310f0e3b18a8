"""Ranks that would read different numbers of batches, found before the first one waits for ever."""

from itertools import groupby

from torchmuster.errors import Impossible
from torchmuster.train.agreement import tell_all
from torchmuster.train.world import World


def same_number_everywhere(count: int, world: World, what: str = "batches") -> None:
    """Compare a count over all ranks; where it differs, all ranks raise the same error.

    Without it, the ranks that have more go on alone, and wait for the others until the group times out.
    """
    refuse_different(tell_all(count, world), what)


def refuse_different(counts: list[int], what: str = "batches") -> None:
    """Raise an error that names the ranks and their counts, unless all are the same."""
    if len(set(counts)) <= 1:
        return
    raise Impossible(
        f"the ranks have different numbers of {what}: {_told(counts)} {what}",
        why=f"each one is computed by all ranks together: after {min(counts)} {what}, those that have "
        "more would wait for ever",
        fix="give all ranks the same number (DistributedSampler with drop_last, or equal shards), or use "
        "BatchLoader, which gives a rank without samples an idle batch",
    )


def _told(counts: list[int]) -> str:
    """Write [13, 12, 12] as “rank 0: 13, ranks 1-2: 12”."""
    parts = []
    for count in sorted(set(counts), reverse=True):
        ranks = [rank for rank, one in enumerate(counts) if one == count]
        parts.append(f"{named_ranks(ranks)}: {count}")
    return ", ".join(parts)


def named_ranks(ranks: list[int]) -> str:
    """Write [0, 2, 3, 4] as “ranks 0, 2-4”."""
    runs = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(runs)
