"""A curve of any length in bounded room: where it becomes too long, neighbours become one, with their extremes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# More than any view has places for; what is longer is kept more coarsely, alike from its first value to its last.
_MOST_PARTS = 4096
# What is larger than this is as good as infinite, and would leave nothing else to be seen.
_LARGEST = 1e100


@dataclass(slots=True)
class _Part:
    """What a few neighbours are together: places where each extreme was, so that it is drawn where it was."""

    low: tuple[float, float] | None = None  # (value, x); None: no number yet
    high: tuple[float, float] | None = None
    total: float = 0.0
    numbers: int = 0
    gap_x: float | None = None  # where something was no number
    values: int = 0  # numbers and others

    def add(self, other: "_Part") -> None:
        if other.low is not None:
            self.low = other.low if self.low is None else min(self.low, other.low)
        if other.high is not None:
            self.high = other.high if self.high is None else max(self.high, other.high)
        self.total += other.total
        self.numbers += other.numbers
        self.values += other.values
        if self.gap_x is None:
            self.gap_x = other.gap_x

    @property
    def mean(self) -> float:
        return self.total / self.numbers if self.numbers else math.nan

    def points(self) -> Iterator[tuple[float, float]]:
        """Yield the lowest, the highest and a gap, in the order in which they came."""
        found = {(x, value) for value, x in filter(None, (self.low, self.high))}
        if self.gap_x is not None:
            found.add((self.gap_x, math.nan))
        yield from sorted(found, key=lambda one: one[0])


class LongCurve:
    """Values over x, one after the other."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._each = 1  # so many values are one part

    def add(self, x: float, value: object) -> None:
        """Add a value; what is no number is a gap."""
        number = float(value) if isinstance(value, int | float) else math.nan
        if math.isfinite(number) and abs(number) <= _LARGEST:
            new = _Part((number, x), (number, x), number, 1, None, 1)
        else:
            new = _Part(gap_x=x, values=1)
        if not self._parts or self._parts[-1].values >= self._each:
            if len(self._parts) >= _MOST_PARTS:
                self._parts = _joined(self._parts, 2)
                self._each *= 2
            self._parts.append(_Part())
        self._parts[-1].add(new)

    @property
    def values(self) -> list[float]:
        """The means of all parts, evenly over the values; where there was no number, NaN."""
        return [part.mean for part in self._parts]

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything to draw."""
        return any(part.numbers for part in self._parts)

    def points(self, most: int) -> list[tuple[float, float]]:
        """Return at most so many points (x, value), the extremes among them; a gap is NaN."""
        each = math.ceil(len(self._parts) / max(1, most // 3))  # a part has up to three
        if len(self._parts) <= most and all(part.values == 1 for part in self._parts):
            each = 1
        parts = _joined(self._parts, each) if each > 1 else self._parts
        return [point for part in parts for point in part.points()]


def _joined(parts: Sequence[_Part], count: int) -> list[_Part]:
    """Return fewer parts, each made of so many neighbours."""
    found = []
    for at in range(0, len(parts), count):
        whole = _Part()
        for part in parts[at : at + count]:
            whole.add(part)
        found.append(whole)
    return found
