"""Pictures show the values where they belong, and nothing from outside becomes markup."""

import math
import re
from xml.etree import ElementTree

import pytest

from torchmuster.pages.charts import (
    Axis,
    Bar,
    Curve,
    amount_text,
    bar_chart,
    line_chart,
    linear_scale,
    logarithmic_scale,
)

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert(1)</script>"


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in drawn(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.00124, "s", "1.24 ms"),
        (12.34, "s", "12.3 s"),
        (2.5e-7, "s", "250 ns"),
        (0.0, "s", "0 s"),
        (8.71e10, "FLOP/s", "87.1 GFLOP/s"),
        (1.5e12, "FLOP/s", "1.50 TFLOP/s"),
        (123456.0, "B/s", "123 kB/s"),
        (79.2 * 1024**3, "B", "79.2 GiB"),
        (123456.0, "tokens/s", "123,456 tokens/s"),
        (3.14159, "samples/s", "3.14 samples/s"),
        (0.12345, "1", "0.123"),
        (4096, "1", "4,096"),
        (0.99996, "s", "1.00 s"),
        (12.5, "%", "12.5 %"),
    ],
)
def test_amounts_as_people_read_them(value: float, unit: str, words: str) -> None:
    assert amount_text(value, unit) == words


def test_curves_have_their_points_where_their_values_are() -> None:
    svg = line_chart(
        "speed",
        Axis(title="size", unit="1", log=True),
        Axis(title="FLOP/s", unit="FLOP/s"),
        [Curve(name="fp32", points=[(128, 1e9), (256, 2e9), (512, 3e9)])],
    )  # fmt: skip
    (line,) = drawn(svg).iter(f"{SVG}polyline")
    points = [tuple(map(float, one.split(","))) for one in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # equal factors, equally far apart
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)  # upwards, and linear
    assert {"128", "256", "512", "fp32", "speed", "size"} <= set(texts(svg))


def test_ticks_of_close_values_have_different_texts() -> None:
    points = ((1.0, 3.9), (2.0, 3.905), (3.0, 3.9097))
    axis = Axis(title="", unit="1", from_zero=False)
    svg = line_chart(
        "loss", Axis(title="step", unit="1"), axis, [Curve(name="loss", points=points)]
    )
    assert [one for one in texts(svg) if one.startswith("3.9")] == [
        *("3.900", "3.902", "3.904", "3.906", "3.908", "3.910"),
    ]


def test_bars_are_as_long_as_their_values_say() -> None:
    svg = bar_chart(
        "step", "s", [Bar(name="one", parts={"": 1.0}), Bar(name="two", parts={"": 2.0})]
    )
    one, two = (
        float(rect.attrib["width"])
        for rect in drawn(svg).iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    )
    assert two == pytest.approx(2 * one, abs=0.2)
    assert {"one", "two", "1.00 s", "2.00 s"} <= set(texts(svg))


def test_stacks_add_up_and_equal_parts_have_equal_colours() -> None:
    svg = bar_chart(
        "step",
        "s",
        [
            Bar(name="1", parts={"compute": 3.0, "data": 1.0}),
            Bar(name="2", parts={"data": 2.0}),
        ],
    )
    found = [rect for rect in drawn(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    colours = [re.search(r"--c\d", one.attrib["style"]) for one in found]
    assert [one[0] for one in colours if one] == ["--c0", "--c1", "--c1"]
    assert {"4.00 s", "2.00 s", "compute", "data"} <= set(texts(svg))


@pytest.mark.parametrize(
    "svg",
    [
        line_chart(
            EVIL, Axis(title=EVIL), Axis(title=EVIL), [Curve(name=EVIL, points=[(1, 1), (2, 2)])]
        ),
        bar_chart(EVIL, "s", [Bar(name=EVIL, parts={EVIL: 1.0}, label=EVIL)]),
        bar_chart(EVIL, "s", [Bar(name=EVIL, parts={EVIL: 1.0, "b": 2.0})]),
        line_chart("empty", Axis(title="x", log=True), Axis(title="y"), []),
        bar_chart("empty", "s", []),
        bar_chart("nothing", "s", [Bar(name="0", parts={"": 0.0})]),
    ],
)
def test_names_are_texts_and_empty_pictures_can_be_drawn(svg: str) -> None:
    tree = drawn(svg)
    assert not list(tree.iter(f"{SVG}script"))
    assert "prefers-color-scheme:dark" in svg


def test_scales_end_on_round_numbers_and_have_few_ticks() -> None:
    scale = linear_scale([0.0, 9.1e10], 0, 100)
    assert scale.ticks == (0.0, 2e10, 4e10, 6e10, 8e10, 1e11)
    assert scale.place(1e11) == pytest.approx(100)
    wide = logarithmic_scale([10.0**power * one for power in range(9) for one in (1, 3)], 0, 100)
    assert wide.ticks == tuple(10.0**power for power in range(9))
    assert logarithmic_scale([128, 256, 512], 0, 100).ticks == (128, 256, 512)


def test_what_is_no_number_leaves_a_gap_with_a_cross() -> None:
    points = [(1, 5.0), (2, 4.0), (3, math.nan), (4, 3.0)]
    svg = line_chart(
        "loss",
        Axis(title="step"),
        Axis(title=""),
        [Curve(name="", points=points, marked=False)],
        width=440,
        height=150,
    )
    tree = drawn(svg)
    (line,) = tree.iter(f"{SVG}polyline")
    assert len(line.attrib["points"].split()) == 2
    marks = [mark.findtext(f"{SVG}title") for mark in tree.iter(f"{SVG}path")]
    assert marks == ["NaN at 3", ""]  # and a point that has no neighbour
    assert tree.attrib["width"] == "440"
    only_gaps = [Curve(name="", points=[(1, math.nan)], marked=False)]
    assert not list(
        drawn(line_chart("x", Axis(title=""), Axis(title=""), only_gaps)).iter("polyline")
    )


@pytest.mark.parametrize(
    "values", [[1.0, 1.0 + 1e-15], [0.0, 1e-320], [-1e99, 1e99], [3e-13, 4e-13], [7.0]]
)
def test_scales_of_values_that_are_close_or_far_apart_have_ticks(values: list[float]) -> None:
    scale = linear_scale(values, 0, 100, from_zero=False)
    assert 2 <= len(scale.ticks) <= 12
    assert all(-1 <= scale.place(value) <= 101 for value in values)
