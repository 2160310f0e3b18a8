"""From samples to a figure and how far it can be trusted, without assuming what noise looks like."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95


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
    place = _outermost(count)
    return Estimate(
        median=statistics.median(ordered),
        low=ordered[place],
        high=ordered[count - 1 - place],
        count=count,
    )


def _outermost(count: int) -> int:
    """Return how many samples can be left out on each side."""
    outside, place = 0.0, 0  # the chance that the median is beyond, on one side
    while place < (count - 1) // 2:
        outside += math.comb(count, place) / 2**count
        further = outside + math.comb(count, place + 1) / 2**count
        if 2 * further > 1 - _CONFIDENCE:
            break
        place += 1
    return place
