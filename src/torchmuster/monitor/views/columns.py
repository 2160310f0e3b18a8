"""Rows under titles, in as many columns as fit: what matters most is kept longest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from torchmuster.monitor.views.bars import QUIET, fitted

Row = TypeVar("Row")
_GAP = 2


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """One column. ``matters`` orders those that do not all fit: 0 is always kept.

    One with ``takes_rest`` has at least its width, and what is left of the line.
    """

    title: str
    width: int
    cell: Callable[[Row], Text]
    matters: int = 0
    right: bool = False
    takes_rest: bool = False


def chosen(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    """Return those that fit, in their order."""
    kept: list[Column[Row]] = []
    left = width + _GAP
    for one in sorted(columns, key=lambda one: one.matters):
        if one.matters == 0 or one.width + _GAP <= left:
            kept.append(one)
            left -= one.width + _GAP
    return [one for one in columns if one in kept]


def lines(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, *, marks: Mapping[str, str]
) -> list[Text]:
    """Return the titles and a line for each row; ``marks`` are put behind titles, which stand out by it."""
    kept = chosen(columns, width)
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
