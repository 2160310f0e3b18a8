"""The bandwidths of messages between ranks, in the terms of nccl-tests.

Algorithm bandwidth is the size of a message divided by its time. Bus bandwidth is the
algorithm bandwidth times a factor per collective, so that it does not depend on the number of
ranks and can be compared with the hardware. Sizes and factors follow nccl-tests' PERFORMANCE.md.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.bench.statistics import Estimate, estimate

_DRAWN = 200  # bootstrap samples for the error estimate
_INSIDE = 0.95


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """The fitted line, its 95 % intervals, and the residuals of the measured medians."""

    latency_s: float
    latency_low_s: float
    latency_high_s: float
    bytes_s: float | None  # None: unknown, as larger messages took no longer
    bytes_low_s: float | None
    bytes_high_s: float | None  # None: no upper bound
    misfit: float  # root mean square of the relative residuals

    def takes_s(self, size_bytes: float) -> float:
        """Return the predicted time of a message of this size."""
        return self.latency_s + (size_bytes / self.bytes_s if self.bytes_s else 0.0)


def fit_alpha_beta(times: Mapping[int, Sequence[float]]) -> AlphaBeta | None:
    """Fit a line to samples by size in bytes; None for fewer than three sizes."""
    if len(times) < 3:
        return None
    medians = {size: estimate(samples).median for size, samples in times.items()}
    latency_s, byte_s = _bandwidth_line(medians)
    drawn = _drawn_again(times)
    latencies = sorted(one[0] for one in drawn)
    rates = sorted(1 / one[1] if one[1] > 0 else math.inf for one in drawn)
    low, high = _at(rates, (1 - _INSIDE) / 2), _at(rates, (1 + _INSIDE) / 2)
    known = byte_s > 0 and math.isfinite(low)
    differences = [(latency_s + byte_s * size) / took - 1 for size, took in medians.items()]
    return AlphaBeta(
        latency_s=latency_s,
        latency_low_s=_at(latencies, (1 - _INSIDE) / 2),
        latency_high_s=_at(latencies, (1 + _INSIDE) / 2),
        bytes_s=1 / byte_s if known else None,
        bytes_low_s=low if known else None,
        bytes_high_s=high if known and math.isfinite(high) else None,
        misfit=math.sqrt(sum(one * one for one in differences) / len(differences)),
    )


def _drawn_again(times: Mapping[int, Sequence[float]]) -> list[tuple[float, float]]:
    """Return the fits of bootstrap samples."""
    draw = random.Random(0)
    return [
        _bandwidth_line(
            {
                size: estimate(draw.choices(samples, k=len(samples))).median
                for size, samples in times.items()
            }
        )
        for _ in range(_DRAWN)
    ]


def _bandwidth_line(medians: Mapping[int, float]) -> tuple[float, float]:
    """Return latency and seconds per byte, both >= 0, with the least relative squared error."""
    # The sums of the normal equations, weighted by 1/t^2.
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


_MUCH_LOWER = 0.75


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The bandwidth at one size."""

    size_bytes: int
    bytes_s: Estimate


@dataclass(frozen=True, kw_only=True)
class Dip:
    """A size whose bandwidth is much lower than that of sizes on both sides, and by how much."""

    size_bytes: int
    share: float  # of the lower of the two sides' best


@dataclass(frozen=True, kw_only=True)
class CurveShape:
    """Characteristics of a bandwidth curve."""

    peak: CurvePoint
    half_at_bytes: int | None  # None: already the smallest size has more than half
    dips: tuple[Dip, ...]
    falls_to: CurvePoint | None  # the last point, if it is much lower than the peak


def points_of(times: Mapping[int, Sequence[float]], factor: float) -> list[CurvePoint]:
    """Return the bandwidths for times by size; the factor converts them to bus bandwidths."""
    return [
        CurvePoint(size_bytes=size, bytes_s=estimate([factor * size / one for one in samples]))
        for size, samples in sorted(times.items())
    ]


def shape_of(points: Sequence[CurvePoint]) -> CurveShape:
    """Describe a curve whose points are ordered by size."""
    peak = max(points, key=lambda one: one.bytes_s.median)
    last = points[-1]
    return CurveShape(
        peak=peak,
        half_at_bytes=_half_at(points, peak.bytes_s.median / 2),
        dips=tuple(_dips(points)),
        falls_to=last if _much_lower(last, peak) else None,
    )


def _half_at(points: Sequence[CurvePoint], half: float) -> int | None:
    """Return the smallest size that reaches this bandwidth, by log-linear interpolation."""
    for before, after in itertools.pairwise(points):
        low, high = before.bytes_s.median, after.bytes_s.median
        if low < half <= high:
            share = math.log(half / low) / math.log(high / low)
            size = math.log(before.size_bytes) + share * math.log(
                after.size_bytes / before.size_bytes
            )
            return round(math.exp(size))
    return None


def _dips(points: Sequence[CurvePoint]) -> list[Dip]:
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


def _much_lower(one: CurvePoint, other: CurvePoint) -> bool:
    """Return whether a bandwidth is much lower than another, beyond the noise."""
    a, b = one.bytes_s, other.bytes_s
    return a.median < _MUCH_LOWER * b.median and a.high < b.low


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective: the meaning of its size, and its bus bandwidth factor."""

    size: str
    bus_factor: Callable[[int], float]


OPERATIONS: dict[str, Operation] = {
    "all-reduce": Operation(
        size="each rank's buffer", bus_factor=lambda ranks: 2 * (ranks - 1) / ranks
    ),
    "all-gather": Operation(
        size="the result, all ranks' parts", bus_factor=lambda ranks: (ranks - 1) / ranks
    ),
    "reduce-scatter": Operation(
        size="each rank's input", bus_factor=lambda ranks: (ranks - 1) / ranks
    ),
    "all-to-all": Operation(
        size="each rank's buffer",
        bus_factor=lambda ranks: (ranks - 1) / ranks,
    ),
    "send-receive": Operation(
        size="the buffer that each rank sends to the next",
        bus_factor=lambda _: 1.0,
    ),
}


def algorithm_bytes_s(size_bytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth: message size per time."""
    return size_bytes / seconds


def bus_bytes_s(operation: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth: the algorithm bandwidth times the factor of the collective."""
    return algorithm_bytes_s(size_bytes, seconds) * OPERATIONS[operation].bus_factor(ranks)
