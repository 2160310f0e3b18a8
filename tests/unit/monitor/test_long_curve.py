"""Curves of any length keep their shape, their extremes and their gaps, in bounded room."""

import math

import pytest

from torchmuster.monitor.views.run_picture import LongCurve


def test_a_short_curve_is_kept_as_it_is() -> None:
    made = LongCurve()
    for step, value in ((1, 5.0), (2, None), (3, 4.0)):
        made.add(step, value)
    (first, gap, last) = made.points(500)
    assert (first, last) == ((1, 5.0), (3, 4.0))
    assert gap[0] == 2
    assert math.isnan(gap[1])
    assert [one for one in made.values if not math.isnan(one)] == [5.0, 4.0]


@pytest.mark.parametrize("count", [0, 1, 499, 500, 501, 5000, 100_000])
def test_there_are_never_too_many_points(count: int) -> None:
    made = LongCurve()
    for step in range(count):
        made.add(step, math.nan if step % 7 == 0 else step % 11)
    points = made.points(500)
    assert len(points) <= 500
    assert len(points) == count or count > 500
    assert len(made.values) <= 4096
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_a_long_curve_keeps_its_shape() -> None:
    made = LongCurve()
    for value in range(100_000):
        made.add(value, value)
    assert made.values == sorted(made.values)
    assert made.values[-1] > 99_000
    assert made.points(500)[0] == (0, 0)
    assert made.points(500)[-1] == (99_999, 99_999)


def test_the_extremes_of_a_long_curve_stay_where_they_were() -> None:
    made = LongCurve()
    for step in range(100_000):
        value: float | None = {31_415: 9.0, 50_000: -9.0, 77_777: None}.get(step, 1.0)
        made.add(step, value)
    points = made.points(500)
    assert {(31_415, 9.0), (50_000, -9.0)} <= set(points)
    assert [x for x, value in points if math.isnan(value)] == [77_777]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None, "3", 1e300])
def test_what_cannot_be_drawn_is_a_gap(value: object) -> None:
    made = LongCurve()
    made.add(1, value)
    assert not made.has_numbers
    assert math.isnan(made.points(10)[0][1])
