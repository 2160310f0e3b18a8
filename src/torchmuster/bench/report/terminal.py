"""A bench on one screen: what was asked, the figures, what was chosen and why, what was found."""

import textwrap
from collections.abc import Iterator

from torchmuster.bench.report.report import Report, Table
from torchmuster.diagnose.report.terminal import columns
from torchmuster.finding import render
from torchmuster.redaction import harmless
from torchmuster.units import format_seconds

_MOST_ROWS = 24


def screen(report: Report, *, width: int = 100, colour: bool = False) -> str:
    """Return what a terminal shows; long tables are cut, the page has them whole."""
    blocks = [[harmless(f"{report.question} ({format_seconds(report.took_s)})")]]
    blocks += [[*_table(one, width)] for one in report.tables]
    choices = [
        line
        for one in report.choices
        for line in _wrapped("chosen", f"{one.value}: {one.reason}", width)
    ]
    if choices:
        blocks.append(choices)
    if report.findings:
        blocks.append([render(report.findings, width=width, colour=colour)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _table(table: Table, width: int) -> Iterator[str]:
    yield harmless(table.title)
    for line in columns([table.head, *table.rows[:_MOST_ROWS]], right=True):
        yield f"  {line}"
    if len(table.rows) > _MOST_ROWS:
        yield f"  … and {len(table.rows) - _MOST_ROWS} more, which the page has"
    if table.note:
        yield from _wrapped("", table.note, width)


def _wrapped(title: str, sentence: str, width: int) -> list[str]:
    indent = f"{title:<8}" if title else "  "
    return textwrap.wrap(
        harmless(sentence),
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
