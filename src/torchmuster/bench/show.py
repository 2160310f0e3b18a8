"""A report on the screen, and as a folder with a page, its charts and the record."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from torchmuster.bench.result import RECORD_FILE, Record, Report, Row, Table, encode_record
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status, render
from torchmuster.pages import frame
from torchmuster.pages.charts import Curve, amount_text
from torchmuster.pages.columns import aligned_columns
from torchmuster.redaction import harmless
from torchmuster.runfolder import write_atomically

PAGE_FILE = "report.html"
# A column of a table: its head, and the cell of a row.
Column = tuple[str, Callable[[Row], str]]
TIME: Column = ("time", lambda row: amount_text(row.median_s, "s"))
ERROR: Column = ("relative error", lambda row: f"{row.figures['error']:.1g}")


def screen(report: Report, *, width: int = 100, colour: bool = False) -> str:
    """Return the report as text: the conclusion, the tables, what to do, and findings."""
    blocks = [_wrapped(report.conclusion, width)]
    for table in report.tables:
        lines = [f"  {line}" for line in aligned_columns([table.head, *table.rows], right=True)]
        blocks.append("\n".join([harmless(table.title), *lines]))
    if report.advice:
        blocks.append(_wrapped(f"What to do: {report.advice}", width))
    if report.findings:
        blocks.append(render(report.findings, width=width, colour=colour))
    return "\n\n".join(blocks)


def page(report: Report, record: Record) -> str:
    """Return the report as HTML. All texts are escaped; only the charts are markup."""
    parts = [
        f"<h1>muster bench {escape(record.bench)}</h1>",
        f"<p><b>{escape(report.conclusion)}</b></p>",
        f"<p>{escape(report.advice)}</p>",
    ]
    parts += map(frame.html_article, report.findings)
    for svg in report.charts.values():
        parts.append(f"<figure>{svg}</figure>")
    for table in report.tables:
        html = frame.html_table(table.head, table.rows)
        parts.append(frame.html_details(table.title, html, opened=True))
    facts = {"date": record.date, **record.host, "settings": str(record.settings)}
    parts.append(frame.html_details("measured on", frame.html_table(("", ""), facts.items())))
    return frame.html_page(f"muster bench {record.bench}", parts)


def label(name: str) -> Column:
    """Return the column of a label."""
    return name, lambda row: str(row.labels[name])


def amount(head: str, figure: str, unit: str) -> Column:
    """Return the column of a figure with a unit."""
    return head, lambda row: amount_text(row.figures[figure], unit)


def table(title: str, rows: Sequence[Row], *columns: Column) -> Table:
    """Return the table of rows."""
    cells = [tuple(text_of(row) for _, text_of in columns) for row in rows]
    return Table(title=title, head=tuple(head for head, _ in columns), rows=cells)


def case_text(row: Row) -> str:
    """Return the labels of a row as one text: ``device cpu, size 512``."""
    return ", ".join(f"{name} {value}" for name, value in row.labels.items())


def curves(rows: Sequence[Row], label: str, x: str, value: Callable[[Row], float]) -> list[Curve]:
    """Return a curve of ``value`` over the label ``x`` for each value of another label.

    ``curves(rows, "dtype", "size", tflops)`` draws TFLOPS by size, a curve for each dtype.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curve = points.setdefault(str(row.labels[label]), [])
        curve.append((float(row.labels[x]), value(row)))
    return [Curve(name=name, points=curve) for name, curve in points.items()]


def wrong_values(bench: str, rows: Sequence[Row], limits: Mapping[str, float]) -> list[Finding]:
    """Return a failure for each row whose relative error exceeds the limit of its dtype, or is NaN."""
    findings = []
    for row in rows:
        limit = limits[str(row.labels["dtype"])]
        error = row.figures["error"]
        if not error <= limit:
            findings.append(
                Finding(
                    name=f"{bench}-wrong-values",
                    status=Status.FAILURE,
                    what=f"wrong values: {case_text(row)} has a relative error of {error:.2g}",
                    why=f"rounding explains at most {limit:.0e}",
                    fix="run muster doctor; do not train on this device until the values are right",
                )
            )
    return findings


def save(report: Report, record: Record, folder: Path) -> list[str]:
    """Write page, charts and record into a folder, created if missing; return their names."""
    files = {PAGE_FILE: page(report, record), RECORD_FILE: encode_record(record).decode()}
    for name, svg in report.charts.items():
        files[f"{name}.svg"] = svg
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(folder / name, text)
    except OSError as error:
        raise Impossible(
            f"cannot write to {folder}",
            why=error.strerror or str(error),
            fix="pass --out with another folder, on a disk with free space",
        ) from error
    return list(files)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(harmless(text), width, break_long_words=False, break_on_hyphens=False)
