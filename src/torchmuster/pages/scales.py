"""Where values stand in a picture: scales and their ticks."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MOST_OF_THE_DATA = 14  # so many values at most are their own ticks
_NARROW = 1.15  # ticks closer together than this factor would be written over each other


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to places, and the values that are written on the axis."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]


def linear(values: Sequence[float], start: float, end: float, *, from_zero: bool = True) -> Scale:
    """Return a scale from 0, or from below the least value, to above the largest."""
    low = min([0.0, *values]) if from_zero else min(values)
    high = max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # too close to be told apart
        high = low + (abs(low) or 1.0)
    step = _step(high - low)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    ticks = tuple(_round(low + number * step, step) for number in range(count + 1))
    return Scale(
        place=lambda value: start + (value - low) / (high - low) * (end - start), ticks=ticks
    )


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale on which equal factors are equally far apart; its ticks are the values, if they are few."""
    values = sorted({value for value in values if value > 0}) or [1.0]
    low, high = values[0], values[-1]
    if high <= low:
        low, high = low / 2, high * 2
    length = math.log(high / low)
    apart = all(later / earlier >= _NARROW for earlier, later in itertools.pairwise(values))
    own = apart and 1 < len(values) <= _MOST_OF_THE_DATA
    return Scale(
        place=lambda value: start + math.log(max(value, low / 1e6) / low) / length * (end - start),
        ticks=tuple(values) if own else _decades(low, high),
    )


def _round(value: float, step: float) -> float:
    """Return a tick without the last digits, which sums leave behind."""
    return 0.0 if abs(value) < 1e-6 * step else float(f"{value:.12g}")


def _step(width: float) -> float:
    """Return a round step, of which four to eight make the width."""
    rough = width / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough * 0.999)


def _decades(low: float, high: float) -> tuple[float, ...]:
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [
        factor * 10.0**power
        for power in range(first, last + 1)
        for factor in factors
        if low * 0.999 <= factor * 10.0**power <= high * 1.001
    ]
    return tuple(ticks[:: max(1, math.ceil(len(ticks) / 12))]) or (low, high)
