"""Charts as self-contained SVG, readable in light and dark mode and without colours."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torchmuster.units import format_bytes

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_MOST_OF_THE_DATA = 14  # up to this many values are used as ticks
_NARROW = 14  # pixels; labels of closer ticks would overlap
_WIDTH, _LEFT, _TOP, _HEIGHT = 860, 84, 46, 300
_ROW, _BAR_HEIGHT = 30, 18
_LETTER = 6.4  # the width of a character of 11 px
# The Okabe-Ito palette, distinguishable with colour blindness; lighter colours for dark mode.
_LIGHT = (
    "#0072b2",
    "#c04e00",
    "#00845f",
    "#a8508a",
    "#8a6d00",
    "#4a4a9e",
    "#666666",
    "#7a3b1d",
    "#3d7f8f",
)
_DARK = (
    "#56b4e9",
    "#ff9e4a",
    "#3dd6a3",
    "#f0a3d0",
    "#f0d040",
    "#a9a9ff",
    "#bbbbbb",
    "#d9a184",
    "#8fd3e0",
)
_FONT = "font-family:system-ui,sans-serif;font-size:11px"
# The colours var(--c0) and on, --ink, --paper and --grid, for the class "chart".
RULES = (
    f".chart text{{{_FONT};fill:var(--ink)}}.chart .title{{font-size:14px;font-weight:600}}"
    ".chart{--ink:#1a1a1a;--paper:#ffffff;--grid:#0002;"
    + "".join(f"--c{place}:{one};" for place, one in enumerate(_LIGHT))
    + "}@media (prefers-color-scheme:dark){.chart{--ink:#e8e8e8;--paper:#1b1b1f;--grid:#fff3;"
    + "".join(f"--c{place}:{one};" for place, one in enumerate(_DARK))
    + "}}"
)


def amount_text(value: float, unit: str) -> str:
    """Format an amount with three digits and its unit: ``1.24 ms``, ``87.1 GFLOP/s``, ``79.2 GiB``.

    ``1`` means no unit, ``%`` a share; unknown units are printed unchanged.
    """
    if unit == "B":
        return format_bytes(round(value))
    if unit in ("1", ""):
        return f"{value:,.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.3g}"
    if unit == "%":
        return f"{value:.3g} %"
    if unit == "s":
        size, name = next((one for one in _SMALL if abs(value) >= 0.9995 * one[0]), _SMALL[-1])
        return f"{_three(value / size)} {name}" if value else "0 s"
    if unit in ("B/s", "FLOP/s"):
        size, prefix = next((one for one in _LARGE if abs(value) >= 0.9995 * one[0]), (1.0, ""))
        return f"{_three(value / size)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def tick_text(value: float, unit: str) -> str:
    """Format a round amount for an axis, without trailing zeros."""
    if value == 0:
        return "0"
    number, space, name = amount_text(value, unit).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{space}{name}"


def _tick_texts(values: Sequence[float], unit: str) -> list[str]:
    """Format the ticks of an axis, with more digits if three do not distinguish them."""
    texts = [tick_text(value, unit) for value in values]
    if len(set(texts)) == len(values) or unit not in ("1", ""):
        return texts
    digits = math.ceil(-math.log10(values[1] - values[0]) - 1e-9)
    return [f"{value:.{max(digits, 0)}f}" for value in values]


def _three(value: float) -> str:
    """Format with three significant digits, or more before the point, without exponent."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values to positions; has the ticks of the axis."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]


def linear_scale(
    values: Sequence[float], start: float, end: float, *, from_zero: bool = True
) -> Scale:
    """Return a scale from 0, or from below the least value, to above the largest."""
    low = min([0.0, *values]) if from_zero else min(values)
    high = max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # indistinguishable
        high = low + (abs(low) or 1.0)
    step = _step(high - low)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    ticks = tuple(_round(low + number * step, step) for number in range(count + 1))
    return Scale(
        place=lambda value: start + (value - low) / (high - low) * (end - start), ticks=ticks
    )


def logarithmic_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale; its ticks are the values, if they are few."""
    values = sorted({value for value in values if value > 0}) or [1.0]
    low, high = values[0], values[-1]
    if high <= low:
        low, high = low / 2, high * 2
    length = math.log(high / low)
    step = min((math.log(b / a) for a, b in itertools.pairwise(values)), default=length)
    apart = step / length * abs(end - start) >= _NARROW
    own = apart and 1 < len(values) <= _MOST_OF_THE_DATA
    return Scale(
        place=lambda value: start + math.log(max(value, low / 1e6) / low) / length * (end - start),
        ticks=tuple(values) if own else _decades(low, high),
    )


def _round(value: float, step: float) -> float:
    """Return a tick without floating-point noise."""
    return 0.0 if abs(value) < 1e-6 * step else float(f"{value:.12g}")


def _step(width: float) -> float:
    """Return a round step size that divides the width into four to eight steps."""
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


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis. ``unit`` as in :func:`amount_text`; ``log`` for a logarithmic scale."""

    title: str
    unit: str = ""
    log: bool = False
    from_zero: bool = True  # if not ``log``


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points (x, y); ``low`` and ``high`` are the interval of each y.

    A non-finite y leaves a gap, with a cross at its x. Only a single curve may have no name.
    """

    name: str
    points: Sequence[tuple[float, float]]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    marked: bool = True  # whether to mark each point
    width: float = 2  # of the line: a wide one shows beneath an equal narrow one


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One value; ``label`` is shown next to it instead of the value with its unit."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Parts that make a whole, in order."""

    name: str
    parts: Mapping[str, float]


def line_chart(
    title: str,
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    *,
    width: int = _WIDTH,
    height: int = _HEIGHT,
) -> str:
    """Draw curves over a common x axis, with the intervals of their points if given."""
    names = [curve.name for curve in curves if curve.name]
    right = width - 24.0
    if names:
        right = width - max(156, 48 + _LETTER * max(map(len, names)))
    bottom = _TOP + height
    across = _scale(x, [one[0] for curve in curves for one in curve.points], _LEFT + 12, right)
    ends = [value for curve in curves for value in (*(curve.low or ()), *(curve.high or ()))]
    values = [one[1] for curve in curves for one in curve.points if math.isfinite(one[1])]
    up = _scale(y, [*values, *ends], bottom - 6, _TOP + 8)
    body = [
        *_grid_of_lines(x, y, across, up, right, bottom),
        *(part for place, one in enumerate(curves) for part in _curve(one, place, across, up)),
        *_names(names, right + 24, _TOP + 10),
    ]
    return svg_chart(title, width, bottom + 50, body)


def bar_chart(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Draw a horizontal bar for each value, with its interval if given."""
    left = _room([one.name for one in bars])
    ends = [end for one in bars for end in (one.value, one.low, one.high) if end is not None]
    along = linear_scale(ends or [1.0], left, _WIDTH - 130)
    body: list[str] = []
    for place, one in enumerate(bars):
        y = _TOP + place * _ROW
        body.append(_text(left - 8, y + 13, one.name, anchor="end"))
        label = one.label or amount_text(one.value, unit)
        body.append(
            _rectangle(along.place(0), y, along.place(one.value), 0, f"{one.name}: {label}")
        )
        end = along.place(max(one.value, 0))
        if one.low is not None and one.high is not None:
            body.append(_whisker(along.place(one.low), along.place(one.high), y))
            end = max(end, along.place(one.high))
        body.append(_text(end + 6, y + 13, label))
    if min(ends, default=0) < 0:
        nothing = along.place(0)
        body.append(_line(nothing, _TOP - 6, nothing, _TOP + len(bars) * _ROW, "var(--ink)"))
    return svg_chart(title, _WIDTH, _TOP + len(bars) * _ROW + 14, body)


def stacked_chart(title: str, unit: str, stacks: Sequence[Stack]) -> str:
    """Draw stacked bars; equal names have equal colours."""
    left = _room([one.name for one in stacks])
    names = list(dict.fromkeys(name for one in stacks for name in one.parts))
    along = linear_scale([sum(one.parts.values()) for one in stacks] or [1.0], left, _WIDTH - 130)
    body: list[str] = []
    for place, one in enumerate(stacks):
        y = _TOP + place * _ROW
        body.append(_text(left - 8, y + 13, one.name, anchor="end"))
        so_far = 0.0
        for name, value in one.parts.items():
            tip = f"{one.name}, {name}: {amount_text(value, unit)}"
            start, end = along.place(so_far), along.place(so_far + value)
            body.append(_rectangle(start, y, end, names.index(name), tip))
            if end - start > _LETTER * len(amount_text(value, unit)) + 4:
                middle = (start + end) / 2
                body.append(
                    f'<text x="{middle:.1f}" y="{y + 13}" text-anchor="middle" pointer-events="none" '
                    f'style="fill:var(--paper)">{escape(amount_text(value, unit))}</text>'
                )
            so_far += value
        body.append(_text(along.place(so_far) + 6, y + 13, amount_text(so_far, unit)))
    y, x = _TOP + len(stacks) * _ROW + 14, 14.0
    for place, name in enumerate(names):
        wide = 30 + _LETTER * len(name)
        if x + wide > _WIDTH:
            x, y = 14.0, y + 20
        body.append(_square(x, y - 9, place))
        body.append(_text(x + 16, y, name))
        x += wide
    return svg_chart(title, _WIDTH, y + 16, body)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    if axis.log:
        return logarithmic_scale(values, start, end)
    return linear_scale(values or [1.0], start, end, from_zero=axis.from_zero)


def svg_chart(title: str, width: float, height: float, body: Sequence[str]) -> str:
    """Return an SVG of these parts.

    ``var(--c0)`` and on are its colours, in light and dark mode.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">',
            f"<style>{RULES}</style>",
            f'<rect width="{width:g}" height="{height:g}" style="fill:var(--paper)"/>',
            f'<text x="14" y="24" class="title">{escape(title)}</text>',
            *body,
            "</svg>\n",
        ]
    )


def _grid_of_lines(
    x: Axis, y: Axis, across: Scale, up: Scale, right: float, bottom: float
) -> Iterator[str]:
    for value, words in zip(up.ticks, _tick_texts(up.ticks, y.unit), strict=True):
        place = up.place(value)
        yield _line(_LEFT, place, right + 8, place, "var(--grid)")
        yield _text(_LEFT - 6, place + 4, words, anchor="end")
    last = -1e9
    for value, words in zip(across.ticks, _tick_texts(across.ticks, x.unit), strict=True):
        place = across.place(value)
        yield _line(place, _TOP, place, bottom, "var(--grid)")
        half = _LETTER * len(words) / 2 + 3
        if place - half > last:  # a label that would overlap the previous one is left out
            yield _text(place, bottom + 16, words, anchor="middle")
            last = place + half
    yield _text((_LEFT + right) / 2, bottom + 36, x.title, anchor="middle")
    yield _text(14, _TOP - 6, y.title)


def _curve(curve: Curve, place: int, across: Scale, up: Scale) -> Iterator[str]:
    dash = ' stroke-dasharray="6 4"' if curve.dashed else ""
    colour = f"var(--c{place % len(_LIGHT)})"
    for number, part in itertools.groupby(curve.points, lambda one: math.isfinite(one[1])):
        points = [(across.place(x), up.place(y)) for x, y in part] if number else []
        if not number:
            yield from (_no_number(across.place(x), x) for x, _ in part)
        elif len(points) == 1 and not curve.marked:
            yield _shape(*points[0], place, curve.name)
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{path}" style="stroke:{colour};fill:none;stroke-width:{curve.width:g}"{dash}/>'
    drawn = [(across.place(x), y) for x, y in curve.points]
    if curve.low is not None and curve.high is not None:
        for (x, _), low, high in zip(drawn, curve.low, curve.high, strict=True):
            yield _line(x, up.place(low), x, up.place(high), colour, wide=1.5)
    if curve.marked:
        for x, y in drawn:
            if math.isfinite(y):
                yield _shape(x, up.place(y), place, f"{curve.name}: {y:.4g}")


def _no_number(x: float, at: float) -> str:
    """Return a cross at the top for a missing value."""
    tip = f"<title>NaN at {at:g}</title>"
    style = "stroke:var(--c1);stroke-width:2;fill:none"
    return f'<path d="M{x - 3:.1f} {_TOP + 2}l6 6m0 -6l-6 6" style="{style}">{tip}</path>'


def _names(names: Sequence[str], x: float, y: float) -> Iterator[str]:
    for place, name in enumerate(names):
        yield _shape(x, y + place * 20, place, name)
        yield _text(x + 12, y + place * 20 + 4, name)


def _shape(x: float, y: float, place: int, tip: str) -> str:
    """Return a marker; each curve has its own shape, for printing without colours."""
    fill = f'style="fill:var(--c{place % len(_LIGHT)})"'
    title = f"<title>{escape(tip)}</title>"
    match place % 4:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}>{title}</circle>'
        case 1:
            return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {fill}>{title}</rect>'
        case 2:
            return f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z" {fill}>{title}</path>'
        case _:
            return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" {fill}>{title}</path>'


def _room(names: Sequence[str]) -> float:
    return min(320.0, 24 + _LETTER * max((len(name) for name in names), default=0))


def _rectangle(start: float, y: float, end: float, colour: int, tip: str) -> str:
    return (
        f'<rect x="{min(start, end):.1f}" y="{y}" width="{abs(end - start):.1f}" height="{_BAR_HEIGHT}" '
        f'style="fill:var(--c{colour % len(_LIGHT)});stroke:var(--paper);stroke-width:.5">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _square(x: float, y: float, colour: int) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="11" height="11" style="fill:var(--c{colour % len(_LIGHT)})"/>'


def _whisker(low: float, high: float, y: float) -> str:
    middle = y + _BAR_HEIGHT / 2
    return (
        f'<path d="M{low:.1f} {middle - 4}v8M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 4}v8" '
        'style="stroke:var(--ink);stroke-width:1.2;fill:none"/>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, wide: float = 1) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
        f'style="stroke:{colour};stroke-width:{wide:g}"/>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
