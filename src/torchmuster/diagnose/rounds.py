"""Rounds of disjoint pairs: in each round, no host is in two pairs.

Pairs of one round can be measured in parallel without disturbing each other.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

Group = TypeVar("Group")
Pair = tuple[int, int]


def rounds_for(count: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of ``range(count)`` in which every two meet exactly once.

    The circle method: one stays, the others rotate by one place, opposite places meet. That takes
    ``count - 1`` rounds, or ``count`` if the number is odd, since then one pauses in each.
    A pair is (lower, higher).
    """
    if count < 2:
        return []
    places = count + count % 2  # with an odd number, the partner of the last place pauses
    moving = places - 1
    rounds = []
    for turn in range(moving):
        meetings = [(turn, moving)]
        meetings += [
            ((turn + step) % moving, (turn - step) % moving) for step in range(1, places // 2)
        ]
        rounds.append(sorted((min(pair), max(pair)) for pair in meetings if max(pair) < count))
    return rounds


def collective_rounds(count: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs that cover every link at a distance of 1, 2, 4, 8, … ranks.

    Ranks are counted in a circle. Rings, recursive doubling and both of NCCL's binary trees use no
    other links. A host has two links of each distance, so three rounds per distance are enough.
    """
    rounds: list[list[Pair]] = []
    met: set[Pair] = set()
    distance = 1
    while distance < count:
        others = ((item, (item + distance) % count) for item in range(count))
        links = dict.fromkeys((min(pair), max(pair)) for pair in others)
        rounds += disjoint((pair for pair in links if pair not in met), members=tuple)
        met.update(links)
        distance *= 2
    return rounds


def disjoint(
    groups: Iterable[Group], members: Callable[[Group], Iterable[int]]
) -> list[list[Group]]:
    """Distribute groups greedily, in order, over rounds in which no member occurs twice."""
    rounds: list[list[Group]] = []
    busy: list[set[int]] = []
    for group in groups:
        wanted = set(members(group))
        for chosen, used in zip(rounds, busy, strict=True):
            if used.isdisjoint(wanted):
                chosen.append(group)
                used |= wanted
                break
        else:
            rounds.append([group])
            busy.append(wanted)
    return rounds
