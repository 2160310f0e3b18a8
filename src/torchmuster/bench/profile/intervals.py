"""Sets of moments as sorted, disjoint intervals: the lanes of a trace.

An interval takes 16 bytes, so that the lanes of a long trace fit into memory.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator


class Intervals:
    """Moments of an activity; begins and ends in the unit of the caller."""

    __slots__ = ("begins", "ends")

    def __init__(
        self, begins: "array[float] | None" = None, ends: "array[float] | None" = None
    ) -> None:
        self.begins = array("d") if begins is None else begins
        self.ends = array("d") if ends is None else ends

    @classmethod
    def of(cls, *sorted_pairs: Iterable[tuple[float, float]]) -> "Intervals":
        """Return the union of intervals, each row of them sorted by their begins; they may overlap and touch."""
        begins, ends = array("d"), array("d")
        for begin, end in heapq.merge(*sorted_pairs):
            if end <= begin:
                continue
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        return cls(begins, ends)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.begins, self.ends, strict=True)

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def total(self) -> float:
        """The total length."""
        return sum(end - begin for begin, end in self)

    def __or__(self, other: "Intervals") -> "Intervals":
        return Intervals.of(self, other)

    def __and__(self, other: "Intervals") -> "Intervals":
        begins, ends = array("d"), array("d")
        first = second = 0
        while first < len(self) and second < len(other):
            begin = max(self.begins[first], other.begins[second])
            end = min(self.ends[first], other.ends[second])
            if begin < end:
                begins.append(begin)
                ends.append(end)
            if self.ends[first] < other.ends[second]:
                first += 1
            else:
                second += 1
        return Intervals(begins, ends)

    def __sub__(self, other: "Intervals") -> "Intervals":
        begins, ends = array("d"), array("d")
        taken = 0
        for begin, end in self:
            while taken < len(other) and other.ends[taken] <= begin:
                taken += 1
            at = taken
            while at < len(other) and other.begins[at] < end:
                if other.begins[at] > begin:
                    begins.append(begin)
                    ends.append(other.begins[at])
                begin = max(begin, other.ends[at])
                at += 1
            if begin < end:
                begins.append(begin)
                ends.append(end)
        return Intervals(begins, ends)

    def holding_any(self, moments: "array[float]") -> "Intervals":
        """Return those of the intervals in which at least one of the sorted moments lies."""
        begins, ends = array("d"), array("d")
        for begin, end in self:
            at = bisect_left(moments, begin)
            if at < len(moments) and moments[at] <= end:
                begins.append(begin)
                ends.append(end)
        return Intervals(begins, ends)
