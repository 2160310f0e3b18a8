"""Sets of moments: compared with sets of whole numbers."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from torchmuster.bench.profile.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12)


def of(pairs: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    rows = sorted((float(begin), float(begin + length)) for begin, length in pairs)
    moments = {at for begin, length in pairs for at in range(begin, begin + length)}
    return Intervals.of(rows), moments


def moments(intervals: Intervals) -> set[int]:
    assert all(
        end < begin for end, begin in zip(intervals.ends, intervals.begins[1:], strict=False)
    )
    return {at for begin, end in intervals for at in range(int(begin), int(end))}


@given(PAIRS, PAIRS)
def test_union_intersection_and_difference_are_those_of_sets(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    (one, one_set), (other, other_set) = of(first), of(second)
    assert moments(one) == one_set
    assert one.total == len(one_set)
    assert moments(one | other) == one_set | other_set
    assert {
        at for pair in one & other for at in range(int(pair[0]), int(pair[1]))
    } == one_set & other_set
    assert {
        at for pair in one - other for at in range(int(pair[0]), int(pair[1]))
    } == one_set - other_set


def test_intervals_in_which_something_ended_are_found() -> None:
    gaps = Intervals.of([(0.0, 2.0), (5.0, 7.0), (9.0, 10.0)])
    assert list(gaps.holding_any(array("d", [1.0, 8.0, 9.5]))) == [(0.0, 2.0), (9.0, 10.0)]
