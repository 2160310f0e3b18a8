"""From samples to a figure and how far it can be trusted, without assuming what noise looks like."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95  # of the interval of one median


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The median of samples, and an interval that holds the true one with 95 %.

    With fewer than six samples no interval can promise so much: then it is their whole range.
    """

    median: float
    low: float
    high: float
    count: int

    @property
    def noise(self) -> float:
        """Half the width of the interval as a share of the median; 0 for what does not vary."""
        width = self.high - self.low
        return width / 2 / abs(self.median) if self.median else (math.inf if width else 0.0)


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of samples with its interval, which two of the samples bound.

    How many of n independent samples lie below the median is a matter of n coins. So the chance that the
    k-th from below and the k-th from above enclose it follows from n and k alone, whatever the distribution.
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
    """By how much one group lies above another, and an interval for it; unbounded where the groups are too small."""

    middle: float
    low: float
    high: float

    def as_shares(self) -> "Shift":
        """Return a shift of logarithms as shares of what it was: 0.03 is 3 % more."""
        return Shift(
            middle=math.expm1(self.middle), low=math.expm1(self.low), high=math.expm1(self.high)
        )


def shift(a: Sequence[float], b: Sequence[float], *, confidence: float) -> Shift:
    """Return by how much ``b`` lies above ``a`` (Hodges and Lehmann), with an interval that needs no assumption but exchange.

    The interval inverts the rank sum test of Mann and Whitney, exactly: it leaves out 0 if and only if the test finds
    a difference at that confidence. Few values give no interval, rather than one that promises too much.
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


def middle(values: Sequence[float], *, confidence: float) -> Shift:
    """Return the median of values, with an interval that needs no assumption at all.

    The interval inverts the sign test: it leaves out 0 if and only if too many values are on one side of it. How far out a few of them
    are makes no difference. Few values give no interval.
    """
    ordered = sorted(values)
    place = _outermost(len(ordered), confidence)
    unknown = 2 / 2 ** len(ordered) > 1 - confidence
    return Shift(
        middle=statistics.median(ordered),
        low=-math.inf if unknown else ordered[place],
        high=math.inf if unknown else ordered[-1 - place],
    )


def fewest_pairs(count: int, *, confidence: float) -> int:
    """Return how many pairs it takes so that one of ``count`` medians can be certain not to be 0."""
    return math.ceil(math.log2(2 * count / (1 - confidence)))


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
