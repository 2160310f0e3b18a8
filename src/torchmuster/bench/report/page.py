"""A bench as one page that needs no other file and no network."""

from html import escape

from torchmuster.bench.environment import Environment
from torchmuster.bench.record import BenchRecord, Series
from torchmuster.bench.report.report import Report, Table
from torchmuster.bench.statistics import estimate
from torchmuster.diagnose.report.terminal import or_unknown
from torchmuster.finding import Status, worst_first
from torchmuster.pages import frame
from torchmuster.pages.figures import amount
from torchmuster.pages.frame import article, folded, table
from torchmuster.units import format_bytes, format_seconds


def page(report: Report) -> str:
    """Return the page. Pictures are ours; everything else is shown as text, never as markup."""
    record = report.record
    found = worst_first(report.findings)
    bad = [one for one in found if one.status in (Status.FAILURE, Status.WARNING)]
    good = [one for one in found if one.status is Status.OK]
    notes = [one for one in found if one.status is Status.NOTE]
    parts = [
        f"<h1>muster bench {escape(report.bench)}: {_verdict(report)}</h1>",
        f"<p>{escape(report.question)}</p>",
        f"<p>measured {escape(record.date)} on {escape(record.environment.host)}, "
        f"in {format_seconds(report.took_s)}</p>",
        *_choices(report),
        *map(article, bad),
        *map(article, good),
        *(
            f"<figure>{one.svg}<figcaption>{escape(one.caption)}</figcaption></figure>"
            for one in report.pictures
        ),
        *map(_table, report.tables),
        *map(article, notes),
        folded("every series, with its noise", table(_TITLES, map(_row, record.series))),
        folded("measured on", _environment(record.environment)),
        folded("settings", _settings(record)),
    ]
    return frame.page(f"muster bench {report.bench}", parts)


def _verdict(report: Report) -> str:
    for status, word in ((Status.FAILURE, "failed"), (Status.WARNING, "with warnings")):
        if any(finding.status is status for finding in report.findings):
            return f'<b class="{status.value}">{word}</b>'
    return '<b class="ok">done</b>'


def _choices(report: Report) -> list[str]:
    chosen = [
        f"<li><b>{escape(one.value)}</b>: {escape(one.reason)}</li>" for one in report.choices
    ]
    return ["<ul>", *chosen, "</ul>"] if chosen else []


def _table(one: Table) -> str:
    note = f"<p>{escape(one.note)}</p>" if one.note else ""
    return folded(one.title, table(one.head, one.rows) + note, opened=True)


_TITLES = ("what", "median", "95 % interval", "noise", "samples")


def _row(series: Series) -> tuple[str, ...]:
    found = estimate(series.samples)
    return (
        series.title,
        amount(found.median, series.unit),
        f"{amount(found.low, series.unit)} to {amount(found.high, series.unit)}",
        f"± {found.noise:.1%}",
        str(found.count),
    )


def _environment(one: Environment) -> str:
    memory = None if one.memory_bytes is None else format_bytes(one.memory_bytes)
    busy = f"{or_unknown(one.busy_before_cores)} before, {or_unknown(one.busy_after_cores)} after"
    rows = (
        ("machine", one.host),
        ("devices", ", ".join(one.devices) or "none: on the processor"),
        ("processor", f"{one.cpu}, {one.cores} cores usable"),
        ("OMP_NUM_THREADS", one.threads or "not set"),
        ("memory", or_unknown(memory)),
        ("driver", or_unknown(one.driver)),
        ("torch", or_unknown(one.torch)),
        ("Python", one.python),
        ("torchmuster", one.torchmuster),
        ("system", one.system),
        ("cores busy with other things", busy),
    )
    return table(("", ""), rows)


def _settings(record: BenchRecord) -> str:
    return table(("", ""), ((key, str(value)) for key, value in record.settings.items()))
