"""Find the fewest causes of bad directions between hosts or ranks: an end, else a single link.

If all directions of an end (in, out or both) are bad, the end is the cause; a single bad link may
be the fault of either end. Hosts and ranks, connections, speeds and wrong values are blamed alike.
"""

import enum
import itertools
from collections.abc import Collection
from dataclasses import dataclass

Direction = tuple[int, int]  # from, to

# With one bad link, either end may be the cause.
_FEWEST_OTHERS = 2


class Blamed(enum.Enum):
    """What causes a group of bad directions."""

    EVERYTHING = enum.auto()  # all directions of the group are bad
    END = enum.auto()  # both directions of all links of one end
    INTO = enum.auto()
    OUT_OF = enum.auto()
    LINK = enum.auto()  # both directions between two ends
    DIRECTION = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Blame:
    """One cause; ``end`` is the host or rank, if it is one."""

    kind: Blamed
    directions: tuple[Direction, ...]
    end: int | None = None


def blame(bad: Collection[Direction], known: Collection[Direction] | None = None) -> list[Blame]:
    """Explain the bad directions among all that were tested.

    Without ``known``, only bad directions were observed: then an end with bad directions to several
    others is the cause. A direction from an end to itself is that end's fault.
    """
    tested = set(bad if known is None else known)
    ends = sorted(set(itertools.chain.from_iterable(tested)))
    left = set(bad)
    if known is not None and len(ends) > _FEWEST_OTHERS and left == tested:
        return [Blame(kind=Blamed.EVERYTHING, directions=tuple(sorted(left)))]
    causes = []
    for end, other in sorted(left):
        if end == other:
            causes.append(Blame(kind=Blamed.END, end=end, directions=((end, end),)))
            left = {direction for direction in left if end not in direction}
    worst = _most_to(left, set(bad), tested, ends)
    while worst is not None:
        causes.append(worst)
        left -= set(worst.directions)
        worst = _most_to(left, set(bad), tested, ends)
    while left:
        direction = min(left)
        back = (direction[1], direction[0])
        if back in left:
            causes.append(Blame(kind=Blamed.LINK, directions=(direction, back)))
        else:
            causes.append(Blame(kind=Blamed.DIRECTION, directions=(direction,)))
        left -= {direction, back}
    return causes


def _most_to(
    left: set[Direction], bad: set[Direction], tested: set[Direction], ends: list[int]
) -> Blame | None:
    """Return the end whose directions are all bad and that explains the most of those left.

    A direction between two such ends is explained by either; only unexplained ones count.
    """
    best: Blame | None = None
    for end in ends:
        into = {direction for direction in tested if direction[1] == end}
        out_of = {direction for direction in tested if direction[0] == end}
        for kind, own in (
            (Blamed.END, into | out_of),
            (Blamed.INTO, into),
            (Blamed.OUT_OF, out_of),
        ):
            explained = own & left
            opposite = set(itertools.chain.from_iterable(explained)) - {end}
            if len(opposite) < _FEWEST_OTHERS or not own <= bad:
                continue
            if best is None or len(explained) > len(best.directions):
                best = Blame(kind=kind, end=end, directions=tuple(sorted(explained)))
    return best
