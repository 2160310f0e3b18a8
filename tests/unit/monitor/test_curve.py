"""Curves of dots: they fill their room, rise where values rise, and leave gaps where there is no number."""

import math

from torchmuster.monitor.views.curve import curve


def test_a_rising_line() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], width=4, height=2) == ["⠀⠀⡠⠊", "⡠⠊⠀⠀"]


def test_few_values_fill_the_width_and_many_fit_into_it() -> None:
    for count in (2, 3, 100, 10_000):
        lines = curve([float(one % 7) for one in range(count)], width=20, height=3)
        assert [len(line) for line in lines] == [20, 20, 20]
        assert "⠀" not in "".join(max(column) for column in zip(*lines, strict=True))


def test_what_is_no_number_is_a_gap() -> None:
    (line,) = curve([1.0] * 4 + [math.nan] * 4 + [1.0] * 4, width=6, height=1)
    assert line[2:4] == "⠀⠀"
    assert "⠀" not in line[:2] + line[4:]


def test_a_flat_line_lies_in_the_middle_and_nothing_is_nothing() -> None:
    assert curve([3.0, 3.0], width=2, height=2) == ["⠀⠀", "⠉⠉"]
    assert curve([], width=3, height=1) == ["⠀⠀⠀"]
    assert curve([math.nan], width=3, height=1) == ["⠀⠀⠀"]
