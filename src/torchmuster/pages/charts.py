"""Charts as self-contained SVG, readable in light and dark mode and without colours."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torchmuster.units import format_bytes

_LARGE_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_MOST_OF_THE_DATA = 14  # up to this many values are used as ticks
_NARROW = 14  # pixels; labels of closer ticks would overlap
_WIDTH, _LEFT, _TOP, _HEIGHT = 860, 84, 46, 300
_ROW, _BAR_HEIGHT = 30, 18
_RIGHT_OF_BARS = 130  # pixels for the labels
_LETTER = 6.4  # the width of a character of 11 px
_ROUND_STEPS = (1, 2, 2.5, 5, 10)
# Markers around (0, 0): each curve has its own, for printing without colours.
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-4-4h8v8h-8z",
    "M0-5l5 9h-10z",
    "M0-5l5 5-5 5-5-5z",
)
_CROSS = "M-3-3l6 6m0-6l-6 6"
_COLOURS = 9
# The colours are the Okabe-Ito palette, distinguishable with colour blindness; lighter ones for dark mode.
RULES = """\
.chart text{font-family:system-ui,sans-serif;font-size:11px;fill:var(--ink)}
.chart .title{font-size:14px;font-weight:600}
.chart{--ink:#1a1a1a;--paper:#ffffff;--grid:#0002;
--c0:#0072b2;--c1:#c04e00;--c2:#00845f;--c3:#a8508a;--c4:#8a6d00;--c5:#4a4a9e;--c6:#666666;--c7:#7a3b1d;--c8:#3d7f8f}
@media (prefers-color-scheme:dark){.chart{--ink:#e8e8e8;--paper:#1b1b1f;--grid:#fff3;
--c0:#56b4e9;--c1:#ff9e4a;--c2:#3dd6a3;--c3:#f0a3d0;--c4:#f0d040;--c5:#a9a9ff;--c6:#bbbbbb;--c7:#d9a184;--c8:#8fd3e0}}
"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis. ``unit`` as in :func:`amount_text`; ``log`` for a logarithmic scale."""

    title: str
    unit: str = ""
    log: bool = False
    from_zero: bool = True  # if not ``log``


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values to positions; has the ticks of the axis."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points (x, y); a y that is not finite leaves a gap, with a cross at its x.

    Only a single curve may have no name.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    marked: bool = True  # whether to mark each point
    width: float = 2  # of the line: a wide one shows beneath an equal narrow one


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Parts that make a whole, in order; ``label`` is shown next to it instead of the total."""

    name: str
    parts: Mapping[str, float]
    label: str = ""


def amount_text(value: float, unit: str) -> str:
    """Format an amount with three digits and its unit: ``1.24 ms``, ``87.1 GFLOP/s``, ``79.2 GiB``.

    ``1`` means no unit; unknown units are printed unchanged.
    """
    if unit == "B":
        return format_bytes(round(value))
    if unit in ("1", ""):
        is_integer = value == round(value) and abs(value) < 1e7
        return f"{value:,.0f}" if is_integer else f"{value:.3g}"
    if unit == "s":
        return _scaled(value, _SECONDS) if value else "0 s"
    if unit in ("B/s", "FLOP/s"):
        return _scaled(value, _LARGE_UNITS) + unit
    return f"{_three_digits(value)} {unit}"


def line_chart(
    title: str,
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    *,
    width: int = _WIDTH,
    height: int = _HEIGHT,
) -> str:
    """Draw curves over a common x axis; their names are in a legend at the right."""
    names = [curve.name for curve in curves if curve.name]
    right = width - 24.0
    if names:
        right = width - max(156, 48 + _LETTER * max(map(len, names)))
    bottom = _TOP + height
    xs: list[float] = []
    ys: list[float] = []
    for curve in curves:
        for value, result in curve.points:
            xs.append(value)
            if math.isfinite(result):
                ys.append(result)
    across = _scale(x, xs, _LEFT + 12, right)
    up = _scale(y, ys, bottom - 6, _TOP + 8)
    body = _grid(x, y, across, up, right, bottom)
    for index, curve in enumerate(curves):
        body += _curve(curve, index, across, up)
    for index, name in enumerate(names):
        line = _TOP + 10 + index * 20
        body.append(_marker(right + 24, line, index, name))
        body.append(_text(right + 36, line + 4, name))
    return _chart(title, width, bottom + 50, body)


def bar_chart(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Draw a horizontal bar for each whole; equal names of parts have equal colours, in a legend below."""
    names: dict[str, None] = {}
    totals = [0.0]
    longest = 0
    for bar in bars:
        names.update(dict.fromkeys(bar.parts))
        totals.append(sum(bar.parts.values()))
        longest = max(longest, len(bar.name))
    colours = list(names)
    left = min(320.0, 24 + _LETTER * longest)
    along = linear_scale(totals, left, _WIDTH - _RIGHT_OF_BARS)
    body: list[str] = []
    y = _TOP
    for bar in bars:
        body.append(_text(left - 8, y + 13, bar.name, anchor="end"))
        total = 0.0
        for part, value in bar.parts.items():
            start, end = along.place(total), along.place(total + value)
            body.append(
                _rectangle(
                    start, y, end - start, _BAR_HEIGHT, colours.index(part), f"{bar.name} {part}"
                )
            )
            total += value
        label = bar.label or amount_text(total, unit)
        body.append(_text(along.place(total) + 6, y + 13, label))
        y += _ROW
    if len(colours) > 1:
        body += _legend(colours, y + 14)
        y += 14 + 20 * math.ceil(sum(map(_legend_width, colours)) / _WIDTH)
    return _chart(title, _WIDTH, y + 14, body)


def linear_scale(
    values: Sequence[float], start: float, end: float, *, from_zero: bool = True
) -> Scale:
    """Return a scale from 0, or from below the least value, to above the largest."""
    low, high = min(values), max(values)
    if from_zero:
        low = min(0.0, low)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # indistinguishable
        high = low + (abs(low) or 1.0)
    # A round step that divides the width into four to eight steps.
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = power * next(size for size in _ROUND_STEPS if power * size >= (high - low) / 5 * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    low, high = first * step, last * step
    ticks = []
    for number in range(last - first + 1):
        tick = low + number * step
        is_zero = abs(tick) < 1e-6 * step
        ticks.append(0.0 if is_zero else float(f"{tick:.12g}"))  # without floating-point noise

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    return Scale(place=place, ticks=tuple(ticks))


def logarithmic_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale; its ticks are the values, if they are few."""
    values = sorted({value for value in values if value > 0}) or [1.0]
    low, high = values[0], values[-1]
    if high <= low:
        low, high = low / 2, high * 2
    length = math.log(high / low)
    ticks = tuple(values)
    closest = length
    for smaller, larger in itertools.pairwise(values):
        closest = min(closest, math.log(larger / smaller))
    has_room = closest / length * abs(end - start) >= _NARROW
    if not has_room or not 1 < len(values) <= _MOST_OF_THE_DATA:
        ticks = _decades(low, high)

    def place(value: float) -> float:
        return start + math.log(max(value, low / 1e6) / low) / length * (end - start)

    return Scale(place=place, ticks=ticks)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    if axis.log:
        return logarithmic_scale(values, start, end)
    return linear_scale(values or [1.0], start, end, from_zero=axis.from_zero)


def _decades(low: float, high: float) -> tuple[float, ...]:
    """Return the powers of ten in a range, with 2 and 5 between them if the range is small."""
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    ticks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for factor in factors:
            tick = factor * 10.0**power
            if low * 0.999 <= tick <= high * 1.001:
                ticks.append(tick)
    every = max(1, math.ceil(len(ticks) / 12))
    return tuple(ticks[::every]) or (low, high)


# ---- texts


def _scaled(value: float, sizes: Sequence[tuple[float, str]]) -> str:
    """Format a value in the largest of the sizes that is not above it, else in the last."""
    fitting = (entry for entry in sizes if abs(value) >= 0.9995 * entry[0])
    size, prefix = next(fitting, sizes[-1])
    return f"{_three_digits(value / size)} {prefix}"


def _three_digits(value: float) -> str:
    """Format with three significant digits, or more before the point, without exponent."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _tick_texts(ticks: Sequence[float], unit: str) -> list[str]:
    """Format the ticks of an axis without trailing zeros, with more digits if three do not distinguish them."""
    texts = []
    for tick in ticks:
        number, space, name = amount_text(tick, unit).partition(" ")
        if "." in number:
            number = number.rstrip("0").rstrip(".")
        texts.append(f"{number}{space}{name}" if tick else "0")
    if len(set(texts)) < len(ticks) and unit in ("1", ""):
        digits = max(0, math.ceil(-math.log10(ticks[1] - ticks[0]) - 1e-9))
        texts = [f"{tick:.{digits}f}" for tick in ticks]
    return texts


# ---- elements


def _chart(title: str, width: float, height: float, body: Sequence[str]) -> str:
    paper = _element("rect", width="100%", height="100%", style="fill:var(--paper)")
    heading = _element("text", escape(title), x=14, y=24, class_="title")
    parts = [f"<style>{RULES}</style>", paper, heading, *body]
    return _element(
        "svg",
        "\n".join(["", *parts, ""]),
        xmlns="http://www.w3.org/2000/svg",
        class_="chart",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        role="img",
        aria_label=escape(title),
    )


def _grid(x: Axis, y: Axis, across: Scale, up: Scale, right: float, bottom: float) -> list[str]:
    """Draw the lines of the ticks with their texts, and the titles of the axes."""
    parts = []
    for tick, text in zip(up.ticks, _tick_texts(up.ticks, y.unit), strict=True):
        height = up.place(tick)
        parts.append(_line(_LEFT, height, right + 8, height))
        parts.append(_text(_LEFT - 6, height + 4, text, anchor="end"))
    end_of_text = -math.inf
    for tick, text in zip(across.ticks, _tick_texts(across.ticks, x.unit), strict=True):
        position = across.place(tick)
        parts.append(_line(position, _TOP, position, bottom))
        half = _LETTER * len(text) / 2 + 3
        if position - half > end_of_text:  # a text that would overlap the previous one is left out
            parts.append(_text(position, bottom + 16, text, anchor="middle"))
            end_of_text = position + half
    parts.append(_text((_LEFT + right) / 2, bottom + 36, x.title, anchor="middle"))
    parts.append(_text(14, _TOP - 6, y.title))
    return parts


def _curve(curve: Curve, index: int, across: Scale, up: Scale) -> list[str]:
    """Draw a line for each run of finite values, their markers, and crosses for the others."""
    parts = []
    style = f"stroke:{_colour(index)};fill:none;stroke-width:{curve.width:g}"
    if curve.dashed:
        style += ";stroke-dasharray:6 4"
    for is_number, points in itertools.groupby(curve.points, lambda point: math.isfinite(point[1])):
        line = []
        for x, y in points:
            if not is_number:
                parts.append(_cross(across.place(x), x))
                continue
            line.append(f"{across.place(x):.1f},{up.place(y):.1f}")
            if curve.marked:
                parts.append(_marker(across.place(x), up.place(y), index, f"{curve.name}: {y:.4g}"))
        if len(line) > 1:
            parts.append(_element("polyline", points=" ".join(line), style=style))
        elif line and not curve.marked:
            parts.append(_marker(across.place(x), up.place(y), index, curve.name))
    return parts


def _legend_width(name: str) -> float:
    return 30 + _LETTER * len(name)


def _legend(names: Sequence[str], y: float) -> list[str]:
    """Draw a square and a name for each colour, in as many lines as needed."""
    parts = []
    x = 14.0
    for index, name in enumerate(names):
        if x + _legend_width(name) > _WIDTH:
            x, y = 14.0, y + 20
        parts.append(_rectangle(x, y - 9, 11, 11, index))
        parts.append(_text(x + 16, y, name))
        x += _legend_width(name)
    return parts


def _colour(index: int) -> str:
    return f"var(--c{index % _COLOURS})"


def _marker(x: float, y: float, index: int, tip: str) -> str:
    shape = _MARKERS[index % len(_MARKERS)]
    return _shape(x, y, shape, f"fill:{_colour(index)}", tip)


def _cross(x: float, at: float) -> str:
    """Draw a cross at the top for a missing value."""
    return _shape(
        x, _TOP + 5, _CROSS, f"stroke:{_colour(1)};stroke-width:2;fill:none", f"NaN at {at:g}"
    )


def _shape(x: float, y: float, shape: str, style: str, tip: str) -> str:
    title = _element("title", escape(tip))
    return _element("path", title, d=shape, transform=f"translate({x:.1f} {y:.1f})", style=style)


def _rectangle(
    x: float, y: float, width: float, height: float, index: int, tip: str | None = None
) -> str:
    title = "" if tip is None else _element("title", escape(tip))
    style = f"fill:{_colour(index)};stroke:var(--paper);stroke-width:.5"
    return _element("rect", title, x=x, y=y, width=width, height=height, style=style)


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return _element("line", x1=x, y1=y, x2=to_x, y2=to_y, style="stroke:var(--grid)")


def _text(x: float, y: float, text: str, *, anchor: str = "start", style: str = "") -> str:
    return _element("text", escape(text), x=x, y=y, text_anchor=anchor, style=style)


def _element(name: str, content: str = "", **attributes: str | float) -> str:
    """Return an SVG element; ``content`` is markup, ``text_anchor`` is the attribute ``text-anchor``."""
    written = ""
    for key, value in attributes.items():
        text = value if isinstance(value, str) else f"{value:.1f}"
        if text:
            written += f' {key.strip("_").replace("_", "-")}="{text}"'
    return f"<{name}{written}>{content}</{name}>"
