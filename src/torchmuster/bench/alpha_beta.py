"""What a message takes by its size: a time of its own (alpha), and its bytes over a bandwidth (beta).

One straight line for all sizes, fitted so that each size counts alike: the errors are relative, since the times go over
orders of magnitude.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.bench.statistics import estimate

_DRAWN = 200  # other samples that could have been measured, for the errors
_INSIDE = 0.95


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The line, how sure it is (95 %), and how far the measured medians are from it."""

    latency_s: float
    latency_low_s: float
    latency_high_s: float
    bytes_s: float | None  # None: larger messages took no longer, so nothing is known of it
    bytes_low_s: float | None
    bytes_high_s: float | None  # None: it may be any larger one
    misfit: float  # root of the mean of the squared relative differences

    def takes_s(self, size_bytes: float) -> float:
        """Return what a message of that size takes by the line."""
        return self.latency_s + (size_bytes / self.bytes_s if self.bytes_s else 0.0)


def fit(times: Mapping[int, Sequence[float]]) -> Fit | None:
    """Fit a line to samples by size in bytes; None for fewer than three sizes."""
    if len(times) < 3:
        return None
    medians = {size: estimate(samples).median for size, samples in times.items()}
    latency_s, byte_s = _line(medians)
    drawn = _drawn_again(times)
    latencies = sorted(one[0] for one in drawn)
    rates = sorted(1 / one[1] if one[1] > 0 else math.inf for one in drawn)
    low, high = _at(rates, (1 - _INSIDE) / 2), _at(rates, (1 + _INSIDE) / 2)
    known = byte_s > 0 and math.isfinite(low)
    differences = [(latency_s + byte_s * size) / took - 1 for size, took in medians.items()]
    return Fit(
        latency_s=latency_s,
        latency_low_s=_at(latencies, (1 - _INSIDE) / 2),
        latency_high_s=_at(latencies, (1 + _INSIDE) / 2),
        bytes_s=1 / byte_s if known else None,
        bytes_low_s=low if known else None,
        bytes_high_s=high if known and math.isfinite(high) else None,
        misfit=math.sqrt(sum(one * one for one in differences) / len(differences)),
    )


def _drawn_again(times: Mapping[int, Sequence[float]]) -> list[tuple[float, float]]:
    """Return the lines of samples drawn from the samples, with repetition: how much chance there is in them."""
    draw = random.Random(0)
    return [
        _line(
            {
                size: estimate(draw.choices(samples, k=len(samples))).median
                for size, samples in times.items()
            }
        )
        for _ in range(_DRAWN)
    ]


def _line(medians: Mapping[int, float]) -> tuple[float, float]:
    """Return latency and seconds per byte, neither below 0, that are relatively nearest to the times."""
    # Weighed by 1/t^2, the sums of the normal equations.
    weights = {size: 1 / took**2 for size, took in medians.items()}
    one = sum(weights.values())
    x = sum(weight * size for size, weight in weights.items())
    xx = sum(weight * size * size for size, weight in weights.items())
    y = sum(weights[size] * took for size, took in medians.items())
    xy = sum(weights[size] * size * took for size, took in medians.items())
    determinant = one * xx - x * x
    if determinant <= 0:
        return y / one, 0.0
    latency_s = (xx * y - x * xy) / determinant
    byte_s = (one * xy - x * y) / determinant
    if byte_s < 0:
        return y / one, 0.0
    if latency_s < 0:
        return 0.0, xy / xx
    return latency_s, byte_s


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]
