"""Bars and small curves for terminals, and the few colours that ``muster top`` uses.

The colours are the terminal's own blue and red on its own background, dark or light; they stay
distinguishable with red-green colour blindness. Everything that a colour shows is also shown as
text or by length.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

BAR = "bright_blue"
WRONG = "bold red"
QUIET = "dim"
# Precedes what is wrong, so that it is visible without colours.
MARK = "!"
# Above these widths, bars are longer and labels are not abbreviated.
WIDE, VERY_WIDE = 110, 150
_LEVELS = "▁▂▃▄▅▆▇█"


def bar(share: float | None, length: int, *, wrong: bool = False) -> Text:
    """Return a bar filled to this share; empty if the share is unknown."""
    if share is None:
        return Text(" " * length)
    share = min(max(share, 0.0), 1.0)
    filled = round(share * length) or (1 if share > 0.02 else 0)
    text = Text().append("━" * filled, style=WRONG if wrong else BAR)
    return text.append("─" * (length - filled), style=QUIET)


def curve_of_percents(percents: Sequence[int], length: int) -> Text:
    """Return the latest values as columns, newest on the right."""
    last = percents[-length:] if length > 0 else ()
    signs = "".join(_LEVELS[min(max(one, 0), 100) * (len(_LEVELS) - 1) // 100] for one in last)
    return Text(signs.rjust(length), style=BAR)


def fitted(text: Text, width: int) -> Text:
    """Return the text padded or cut to exactly this width; a cut is marked."""
    text = Text().append_text(text)  # so that added padding has no style
    if text.cell_len > width:
        text.truncate(max(width - 1, 0))
        text.rstrip()
        text.append("…"[:width])
    text.append(" " * (width - text.cell_len))
    return text


Row = TypeVar("Row")
_GAP = 2


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """One column. ``matters`` decides which columns are dropped if they do not all fit: 0 is kept.

    A column with ``takes_rest`` gets at least its width plus the rest of the line.
    """

    title: str
    width: int
    cell: Callable[[Row], Text]
    matters: int = 0
    right: bool = False
    takes_rest: bool = False


def columns_that_fit(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    """Return the columns that fit, in their order."""
    kept: list[Column[Row]] = []
    left = width + _GAP
    for one in sorted(columns, key=lambda one: one.matters):
        if one.matters == 0 or one.width + _GAP <= left:
            kept.append(one)
            left -= one.width + _GAP
    return [one for one in columns if one in kept]


def column_lines(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, *, marks: Mapping[str, str]
) -> list[Text]:
    """Return the titles and a line for each row.

    ``marks`` are appended to the titles to highlight.
    """
    kept = columns_that_fit(columns, width)
    rest = width - sum(one.width for one in kept) - _GAP * (len(kept) - 1)
    widths = [one.width + (rest if one.takes_rest and rest > 0 else 0) for one in kept]
    titles = [
        Text(f"{one.title}{marks[one.title]}", style="bold")
        if one.title in marks
        else Text(one.title, style=QUIET)
        for one in kept
    ]
    made = [_joined([_placed(*one) for one in zip(titles, kept, widths, strict=True)])]
    for row in rows:
        cells = [_placed(one.cell(row), one, own) for one, own in zip(kept, widths, strict=True)]
        made.append(_joined(cells))
    return made


def _placed(text: Text, column: Column[Row], width: int) -> Text:
    if column.right and text.cell_len < width:
        text = Text(" " * (width - text.cell_len)).append_text(text)
    return fitted(text, width)


def _joined(cells: Sequence[Text]) -> Text:
    line = Text(" " * _GAP).join(cells)
    line.rstrip()
    return line


_EMPTY = 0x2800
# The bit of a Braille dot by its column and row within a character.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def curve(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return lines that plot the values from left to right; NaN leaves a gap."""
    columns, rows = 2 * width, 4 * height
    shown = _fitted(values, columns)
    numbers = [one for one in shown if math.isfinite(one)]
    cells = [[_EMPTY] * width for _ in range(height)]
    if numbers:
        low, high = min(numbers), max(numbers)
        before: int | None = None
        for x, value in enumerate(shown):
            if not math.isfinite(value):
                before = None
                continue
            share = (value - low) / (high - low) if high > low else 0.5
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
    if len(values) <= count:
        return [values[place * len(values) // count] for place in range(count)] if values else []
    parts = (
        values[place * len(values) // count : (place + 1) * len(values) // count]
        for place in range(count)
    )
    return [_bars_mean([one for one in part if math.isfinite(one)]) for part in parts]


def _bars_mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
