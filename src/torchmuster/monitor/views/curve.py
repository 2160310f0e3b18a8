"""Curves of Braille dots for terminals."""

import math
from collections.abc import Sequence

_EMPTY = 0x2800
# The bit of a Braille dot by its column and row within a character.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def curve(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return lines that plot the values from left to right; NaN leaves a gap."""
    columns, rows = 2 * width, 4 * height
    shown = _fitted(values, columns)
    numbers = list(filter(math.isfinite, shown))
    cells = [[_EMPTY] * width for _ in range(height)]
    if numbers:
        low, high = min(numbers), max(numbers)
        before: int | None = None
        for x, value in enumerate(shown):
            if not math.isfinite(value):
                before = None
                continue
            share = 0.5
            if high > low:
                share = (value - low) / (high - low)
            y = round((1 - share) * (rows - 1))
            for dot in _between(before, y):
                cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
            before = y
    return ["".join(map(chr, row)) for row in cells]


def _between(before: int | None, y: int) -> range:
    """Return the rows that connect a dot to the previous one."""
    if before is None or before == y:
        return range(y, y + 1)
    return range(before + 1, y + 1) if before < y else range(y, before)


def _fitted(values: Sequence[float], count: int) -> list[float]:
    """Return this many values, each the mean of its bucket; a bucket without numbers stays NaN."""
    if not values:
        return []
    fitted = []
    for column in range(count):
        start = column * len(values) // count
        end = max(start + 1, (column + 1) * len(values) // count)
        numbers = list(filter(math.isfinite, values[start:end]))
        if numbers:
            fitted.append(sum(numbers) / len(numbers))
        else:
            fitted.append(math.nan)
    return fitted
