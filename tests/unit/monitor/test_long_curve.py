"""A curve of any length keeps its shape and its gaps, in bounded room."""

import math

import pytest

from torchmuster.monitor.views.run_picture import LongCurve


@pytest.mark.parametrize("count", [1, 499, 500, 501, 100_000])
def test_a_long_curve_keeps_its_shape(count: int) -> None:
    curve = LongCurve()
    for step in range(count):
        curve.add(step, step)
    assert len(curve.points) <= 500
    assert len(curve.points) == count or count > 500
    assert curve.numbers == sorted(curve.numbers)
    assert curve.numbers[-1] >= 0.99 * (count - 1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None, "3", 1e300])
def test_what_cannot_be_drawn_is_a_gap(value: object) -> None:
    curve = LongCurve()
    curve.add(1, 2.0)
    curve.add(2, value)
    assert curve.numbers == [2.0]
    assert math.isnan(curve.points[1][1])
