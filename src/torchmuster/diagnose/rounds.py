"""Rounds of disjoint pairs: in each round, no host is in two pairs.

Pairs of one round can be measured in parallel without disturbing each other.
"""

import itertools
from collections.abc import Iterable

Pair = tuple[int, int]


def collective_links(count: int) -> list[Pair]:
    """Return every link at a distance of 1, 2, 4, 8, … ranks, with the ranks in a circle.

    Rings, recursive doubling and both of NCCL's binary trees use no other links. A pair is
    (lower, higher).
    """
    links: dict[Pair, None] = {}
    distance = 1
    while distance < count:
        for rank in range(count):
            other = (rank + distance) % count
            links[min(rank, other), max(rank, other)] = None
        distance *= 2
    return list(links)


def disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Distribute pairs greedily, in order, over rounds in which no member occurs twice."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        for members in rounds:
            busy = set(itertools.chain.from_iterable(members))
            if busy.isdisjoint(pair):
                members.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds
