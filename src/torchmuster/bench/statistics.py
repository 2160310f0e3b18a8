"""Medians and shifts with distribution-free intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95  # of the interval of one median


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The median of samples, and its 95 % interval.

    With fewer than six samples no such interval exists: then it is their whole range.
    """

    median: float
    low: float
    high: float
    count: int

    @property
    def noise(self) -> float:
        """Half the width of the interval relative to the median; 0 without variation."""
        width = self.high - self.low
        return width / 2 / abs(self.median) if self.median else (math.inf if width else 0.0)


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of samples with its interval, bounded by two of the samples.

    The number of n independent samples below the median is binomial. So the probability that the
    k-th smallest and the k-th largest enclose it depends on n and k alone, for any distribution.
    """
    ordered = sorted(samples)
    count = len(ordered)
    place = _outermost(count, _CONFIDENCE)
    return Estimate(
        median=statistics.median(ordered),
        low=ordered[place],
        high=ordered[count - 1 - place],
        count=count,
    )


def _outermost(count: int, confidence: float) -> int:
    """Return how many samples can be left out on each side."""
    outside, place = 0.0, 0  # the chance that the median is beyond, on one side
    while place < (count - 1) // 2:
        outside += math.comb(count, place) / 2**count
        further = outside + math.comb(count, place + 1) / 2**count
        if 2 * further > 1 - confidence:
            break
        place += 1
    return place


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The shift between two groups, and its interval; unbounded if the groups are too small."""

    middle: float
    low: float
    high: float

    def as_shares(self) -> "Shift":
        """Return a shift of logarithms as relative change: 0.03 is 3 % more."""
        return Shift(
            middle=math.expm1(self.middle), low=math.expm1(self.low), high=math.expm1(self.high)
        )


def shift(a: Sequence[float], b: Sequence[float], *, confidence: float) -> Shift:
    """Return the shift of ``b`` over ``a`` (Hodges-Lehmann) with its interval.

    The interval inverts the exact Mann-Whitney test: it excludes 0 if and only if the test finds a
    difference at that confidence. Too few values give no interval.
    """
    differences = sorted(after - before for before in a for after in b)
    outside = 0
    ways, allowed = 0, (1 - confidence) / 2 * math.comb(len(a) + len(b), len(a))
    for number in _inversions(len(a), len(b)):
        ways += number
        if ways > allowed:
            break
        outside += 1
    unknown = outside == 0
    return Shift(
        middle=statistics.median(differences),
        low=-math.inf if unknown else differences[outside - 1],
        high=math.inf if unknown else differences[-outside],
    )


def fewest(count: int, *, confidence: float) -> int:
    """Return how many values each of two groups needs so that one of ``count`` shifts can be certain."""
    size = 1
    while 2 * count / math.comb(2 * size, size) > 1 - confidence:
        size += 1
    return size


def _inversions(a: int, b: int) -> list[int]:
    """Return in how many orders of a and b values 0, 1, 2, … pairs are inverted, if all orders are alike."""
    # The Gaussian binomial coefficient: multiply by (1 - x^(b+i)) and divide by (1 - x^i), for i up to a.
    ways = [1] + [0] * (a * b)
    for i in range(1, a + 1):
        for place in range(a * b, b + i - 1, -1):
            ways[place] -= ways[place - b - i]
        for place in range(i, a * b + 1):
            ways[place] += ways[place - i]
    return ways
