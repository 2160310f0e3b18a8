"""What a curve of bandwidth over size says: its peak, where half of it is reached, and where it is not as it should be.

Bandwidth should grow with the size of messages until it no longer does. A size at which it is lower than at
smaller and larger ones (a dip) is one where a library takes another, worse way.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.bench.statistics import Estimate, estimate

_MUCH_LOWER = 0.75


@dataclass(frozen=True, kw_only=True)
class Point:
    """The bandwidth at one size."""

    size_bytes: int
    bytes_s: Estimate


@dataclass(frozen=True, kw_only=True)
class Dip:
    """A size whose bandwidth is much lower than that of sizes on both sides, and by how much."""

    size_bytes: int
    share: float  # of the lower of the two sides' best


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The curve in words."""

    peak: Point
    half_at_bytes: int | None  # None: the smallest size has more than half already
    dips: tuple[Dip, ...]
    falls_to: Point | None  # the last point, if it is much lower than the peak


def points_of(times: Mapping[int, Sequence[float]], factor: float) -> list[Point]:
    """Return the bandwidths of times by size; the factor makes them bus bandwidths."""
    return [
        Point(size_bytes=size, bytes_s=estimate([factor * size / one for one in samples]))
        for size, samples in sorted(times.items())
    ]


def shape_of(points: Sequence[Point]) -> Shape:
    """Look at a curve, whose points are ordered by size."""
    peak = max(points, key=lambda one: one.bytes_s.median)
    last = points[-1]
    return Shape(
        peak=peak,
        half_at_bytes=_half_at(points, peak.bytes_s.median / 2),
        dips=tuple(_dips(points)),
        falls_to=last if _much_lower(last, peak) else None,
    )


def _half_at(points: Sequence[Point], half: float) -> int | None:
    """Return the size at which so much is reached first, between two points by a straight line of logarithms."""
    for before, after in itertools.pairwise(points):
        low, high = before.bytes_s.median, after.bytes_s.median
        if low < half <= high:
            share = math.log(half / low) / math.log(high / low)
            size = math.log(before.size_bytes) + share * math.log(
                after.size_bytes / before.size_bytes
            )
            return round(math.exp(size))
    return None


def _dips(points: Sequence[Point]) -> list[Dip]:
    found = []
    for place in range(1, len(points) - 1):
        here = points[place]
        sides = [
            max(side, key=lambda one: one.bytes_s.median)
            for side in (points[:place], points[place + 1 :])
        ]
        if all(_much_lower(here, side) for side in sides):
            least = min(side.bytes_s.median for side in sides)
            found.append(Dip(size_bytes=here.size_bytes, share=here.bytes_s.median / least))
    return found


def _much_lower(one: Point, other: Point) -> bool:
    """Say whether a bandwidth is much lower than another, and surely so."""
    a, b = one.bytes_s, other.bytes_s
    return a.median < _MUCH_LOWER * b.median and a.high < b.low
