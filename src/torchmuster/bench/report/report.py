"""A bench report: question, findings, decisions, tables, charts and the record."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torchmuster.bench import record
from torchmuster.bench.environment import Environment
from torchmuster.bench.record import BenchRecord, Series
from torchmuster.bench.statistics import estimate
from torchmuster.decision import Decision
from torchmuster.diagnose.report.terminal import aligned_columns, or_unknown
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status, render, worst_first
from torchmuster.pages import frame
from torchmuster.pages.charts import amount_text
from torchmuster.pages.frame import html_article, html_details, html_table
from torchmuster.redaction import harmless
from torchmuster.runfolder import write_atomically
from torchmuster.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts with an explanatory note."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG of ``charts`` with a caption."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of one bench run."""

    bench: str
    question: str  # the question, in one line
    findings: tuple[Finding, ...]
    choices: tuple[Decision[str], ...] = ()
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...] = ()
    record: BenchRecord
    took_s: float


def bench_page(report: Report) -> str:
    """Return the HTML page. Everything except our charts is shown as text, never as markup."""
    record = report.record
    found = worst_first(report.findings)
    bad = [one for one in found if one.status in (Status.FAILURE, Status.WARNING)]
    good = [one for one in found if one.status is Status.OK]
    notes = [one for one in found if one.status is Status.NOTE]
    parts = [
        f"<h1>muster bench {escape(report.bench)}: {_report_verdict(report)}</h1>",
        f"<p>{escape(report.question)}</p>",
        f"<p>measured {escape(record.date)} on {escape(record.environment.host)}, "
        f"in {format_seconds(report.took_s)}</p>",
        *_choices(report),
        *map(html_article, bad),
        *map(html_article, good),
        *(
            f"<figure>{one.svg}<figcaption>{escape(one.caption)}</figcaption></figure>"
            for one in report.pictures
        ),
        *map(_page_table, report.tables),
        *map(html_article, notes),
        html_details(
            "all series with their noise", html_table(_TITLES, map(_report_row, record.series))
        ),
        html_details("measured on", _environment(record.environment)),
        html_details("settings", _settings(record)),
    ]
    return frame.html_page(f"muster bench {report.bench}", parts)


def _report_verdict(report: Report) -> str:
    for status, word in ((Status.FAILURE, "failed"), (Status.WARNING, "with warnings")):
        if any(finding.status is status for finding in report.findings):
            return f'<b class="{status.value}">{word}</b>'
    return '<b class="ok">done</b>'


def _choices(report: Report) -> list[str]:
    chosen = [
        f"<li><b>{escape(one.value)}</b>: {escape(one.reason)}</li>" for one in report.choices
    ]
    return ["<ul>", *chosen, "</ul>"] if chosen else []


def _page_table(one: Table) -> str:
    note = f"<p>{escape(one.note)}</p>" if one.note else ""
    return html_details(one.title, html_table(one.head, one.rows) + note, opened=True)


_TITLES = ("series", "median", "95 % interval", "noise", "samples")


def _report_row(series: Series) -> tuple[str, ...]:
    found = estimate(series.samples)
    return (
        series.title,
        amount_text(found.median, series.unit),
        f"{amount_text(found.low, series.unit)} to {amount_text(found.high, series.unit)}",
        f"± {found.noise:.1%}",
        str(found.count),
    )


def _environment(one: Environment) -> str:
    memory = None if one.memory_bytes is None else format_bytes(one.memory_bytes)
    busy = f"{or_unknown(one.busy_before_cores)} before, {or_unknown(one.busy_after_cores)} after"
    rows = (
        ("machine", one.host),
        ("devices", ", ".join(one.devices) or "none: CPU"),
        ("CPU", f"{one.cpu}, {one.cores} cores usable"),
        ("OMP_NUM_THREADS", one.threads or "not set"),
        ("memory", or_unknown(memory)),
        ("driver", or_unknown(one.driver)),
        ("torch", or_unknown(one.torch)),
        ("Python", one.python),
        ("torchmuster", one.torchmuster),
        ("system", one.system),
        ("cores used by other processes", busy),
    )
    return html_table(("", ""), rows)


def _settings(record: BenchRecord) -> str:
    return html_table(("", ""), ((key, str(value)) for key, value in record.settings.items()))


PAGE = "report.html"


def save_report(report: Report, folder: Path) -> Path:
    """Write the results into a folder, created if missing; return the page's path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record.write_record(folder / record.FILE, report.record)
        for picture in report.pictures:
            name = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-") or "picture"
            write_atomically(folder / f"{name}.svg", picture.svg)
        write_atomically(folder / PAGE, bench_page(report))
    except OSError as error:
        raise Impossible(
            f"cannot write to {folder}",
            why=error.strerror or str(error),
            fix="pass --out with another folder, on a disk with free space",
        ) from error
    return folder / PAGE


_MOST_ROWS = 24


def bench_screen(report: Report, *, width: int = 100, colour: bool = False) -> str:
    """Return the terminal output; long tables are cut, the page has them in full."""
    blocks = [[harmless(f"{report.question} ({format_seconds(report.took_s)})")]]
    blocks += [[*_text_table(one, width)] for one in report.tables]
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


def _text_table(table: Table, width: int) -> Iterator[str]:
    yield harmless(table.title)
    for line in aligned_columns([table.head, *table.rows[:_MOST_ROWS]], right=True):
        yield f"  {line}"
    if len(table.rows) > _MOST_ROWS:
        yield f"  … and {len(table.rows) - _MOST_ROWS} more on the page"
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
