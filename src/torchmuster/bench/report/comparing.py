"""A comparison of two measurements as terminal output, JSON and HTML page."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from torchmuster.bench.comparison import CONFIDENCE, FLOOR, Comparison, MetricChange
from torchmuster.bench.environment import Environment, disturbance, environment_differences
from torchmuster.bench.record import BenchRecord, measured_alternately
from torchmuster.diagnose.report.terminal import aligned_columns
from torchmuster.finding import Finding, Status, render, worst_first
from torchmuster.pages import frame
from torchmuster.pages.charts import Bar, amount_text, bar_chart
from torchmuster.pages.frame import html_article, html_table
from torchmuster.redaction import harmless
from torchmuster.units import plural

_ORDER = ("worse", "better", "unknown", "within noise")
_MOST_ROWS = 24
_MOST_NAMED = 8
_LONGEST_VALUES = 80
_HEAD = ("what", "before", "after", "change", "interval", "")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: its name and records."""

    name: str
    records: Sequence[BenchRecord]


@dataclass(frozen=True, kw_only=True)
class ComparedSides:
    """A comparison with its two sides."""

    before: Side
    after: Side
    comparison: Comparison

    @property
    def changes(self) -> list[MetricChange]:
        """Worse series first, largest change first."""
        return sorted(
            self.comparison.changes,
            key=lambda one: (_ORDER.index(one.verdict), -_comparing_size(one.change)),
        )


def _comparing_size(change: float) -> float:
    return 0.0 if math.isnan(change) else abs(change)


def comparison_question(compared: ComparedSides) -> str:
    """Return one line that describes the comparison."""
    before, after = compared.before, compared.after
    return (
        f"muster bench {before.records[0].bench}: is {after.name} ({_counted(after)}) better or worse "
        f"than {before.name} ({_counted(before)})?"
    )


def _counted(side: Side) -> str:
    return plural(len(side.records), "record")


def not_alike(compared: ComparedSides) -> list[str]:
    """Return other differences between the two sides that could explain a change."""
    before, after = compared.before.records, compared.after.records
    seen = [_usual(before), _usual(after)]
    found = environment_differences(*seen)
    one, other = before[0].settings, after[0].settings
    for key in dict.fromkeys((*one, *other)):
        if one.get(key) != other.get(key):
            values = f": {one.get(key)} and {other.get(key)}"
            found.append(f"different {key}{values if len(values) <= _LONGEST_VALUES else ''}")
    return found


def _usual(records: Sequence[BenchRecord]) -> Environment:
    """Return the first record's environment with the median load of this side."""
    busy = [
        cores
        for one in records
        for cores in (one.environment.busy_before_cores, one.environment.busy_after_cores)
        if cores is not None
    ]
    middle = statistics.median(busy) if busy else None
    return dataclasses.replace(
        records[0].environment, busy_before_cores=middle, busy_after_cores=middle
    )


def _busy(environment: Environment) -> float:
    return environment.busy_before_cores or 0.0


def comparison_findings(compared: ComparedSides) -> list[Finding]:
    """Return the verdict and the caveats."""
    return [*_comparing_verdict(compared), *_doubts(compared)]


def _comparing_verdict(compared: ComparedSides) -> Iterator[Finding]:
    changes = compared.changes
    worse = [one for one in changes if one.verdict == "worse"]
    better = [one for one in changes if one.verdict == "better"]
    unknown = [one for one in changes if one.verdict == "unknown"]
    for some, status, word in ((worse, Status.FAILURE, "worse"), (better, Status.OK, "better")):
        if some:
            yield Finding(
                name=word,
                status=status,
                what=f"{len(some)} of {len(changes)} series are {word}, by up to "
                f"{_comparing_percent(some[0].change)}",
                evidence="\n".join(map(_in_words, some[:_MOST_NAMED])),
            )
    if unknown:
        yield Finding(
            name="unknown",
            status=Status.NOTE,
            what=f"{len(unknown)} series cannot be compared: too few samples, or values of 0",
            evidence="\n".join(one.series.title for one in unknown[:_MOST_NAMED]),
        )
    if not worse and not better and len(unknown) < len(changes):
        seen = [
            compared.comparison.would_be_seen(one)
            for one in changes
            if one.verdict == "within noise"
        ]
        yield Finding(
            name="within-noise",
            status=Status.OK,
            what="no change beyond the noise",
            why=f"a change of {statistics.median(seen):.1%} would be detected in half of the "
            "series, "
            f"a change of {max(seen):.1%} in every series",
        )


def _doubts(compared: ComparedSides) -> Iterator[Finding]:
    comparison, before, after = compared.comparison, compared.before, compared.after
    busiest = max((_usual(one.records) for one in (before, after)), key=_busy)
    disturbed = disturbance(busiest)
    if disturbed is not None:
        yield disturbed
    bench = before.records[0].bench
    alternate = (
        f"run muster bench {bench} --out DIR/N alternately for the old and the new version, at "
        f"least {comparison.records_needed} times each"
    )
    if not comparison.by_records:
        yield Finding(
            name="few-records",
            status=Status.NOTE,
            what=f"only changes beyond {FLOOR:.0%} count: the variation between processes is "
            "unknown",
            why=f"{len(comparison.changes)} series need at least {comparison.records_needed} "
            "records on each "
            "side, each from a fresh process, measured alternately",
            fix=alternate,
        )
    elif not measured_alternately(before.records, after.records):
        yield Finding(
            name="not-in-turns",
            status=Status.WARNING,
            what=f"all records of one side are older than all records of the other ({before.name}, {after.name})",
            why="a change of the host in between would look like a difference",
            fix=alternate,
        )
    if comparison.left_out:
        yield Finding(
            name="left-out",
            status=Status.NOTE,
            what=f"{len(comparison.left_out)} series are not in every record and were ignored",
            evidence="\n".join(comparison.left_out[:_MOST_NAMED]),
        )


def _in_words(one: MetricChange) -> str:
    unit = one.series.unit
    return (
        f"{one.series.title}: {amount_text(one.before, unit)} before, {amount_text(one.after, unit)} after, "
        f"{_comparing_percent(one.change)} ({_interval(one)})"
    )


def _comparing_percent(share: float) -> str:
    return "?" if not math.isfinite(share) else f"{share:+.1%}"


def _interval(one: MetricChange) -> str:
    return f"{_comparing_percent(one.low)} to {_comparing_percent(one.high)}"


def _rows(compared: ComparedSides) -> list[tuple[str, ...]]:
    return [
        (
            one.series.title,
            amount_text(one.before, one.series.unit),
            amount_text(one.after, one.series.unit),
            _comparing_percent(one.change),
            _interval(one),
            one.verdict,
        )
        for one in compared.changes
    ]


def comparison_text(compared: ComparedSides, *, width: int = 100, colour: bool = False) -> str:
    """Return the terminal output."""
    rows = _rows(compared)
    blocks = [[harmless(comparison_question(compared)), *(f"  {one}" for one in _beside(compared))]]
    blocks.append([*aligned_columns([_HEAD, *rows[:_MOST_ROWS]], right=True)])
    if len(rows) > _MOST_ROWS:
        blocks[-1].append(f"… and {len(rows) - _MOST_ROWS} more; use --json or --html to see all")
    blocks[-1].append(f"intervals hold for all series together with {CONFIDENCE:.0%} confidence")
    blocks.append([render(comparison_findings(compared), width=width, colour=colour)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _beside(compared: ComparedSides) -> list[str]:
    return [harmless(one) for one in not_alike(compared)] or [
        "no known difference between the environments"
    ]


def comparison_page(compared: ComparedSides) -> str:
    """Return the HTML page; data from files is shown as text, never as markup."""
    found = comparison_findings(compared)
    failed = any(one.status is Status.FAILURE for one in found)
    word = '<b class="failure">worse</b>' if failed else '<b class="ok">no worse</b>'
    drawn = [
        Bar(
            name=one.series.title,
            value=one.change * 100,
            low=one.low * 100,
            high=one.high * 100,
            label=f"{_comparing_percent(one.change)} {one.verdict}",
        )
        for one in compared.changes
        if math.isfinite(one.low + one.high + one.change)
    ]
    parts = [
        f"<h1>muster bench compare: {word}</h1>",
        f"<p>{escape(comparison_question(compared))}</p>",
        "<ul>",
        *(f"<li>{escape(one)}</li>" for one in _beside(compared)),
        "</ul>",
        *(html_article(one) for one in worst_first(found)),
    ]
    if drawn:
        picture = bar_chart("change, with its interval", "%", drawn)
        parts.append(f"<figure>{picture}</figure>")
    parts.append(html_table(_HEAD, _rows(compared)))
    return frame.html_page("muster bench compare", parts)


def comparison_json(compared: ComparedSides) -> dict[str, object]:
    """Return the comparison as plain JSON types; unknown or unbounded values are null."""
    return {
        "bench": compared.before.records[0].bench,
        "records": [len(compared.before.records), len(compared.after.records)],
        "by_records": compared.comparison.by_records,
        "not_alike": not_alike(compared),
        "changes": [
            {
                "name": one.series.name,
                "labels": dict(one.series.labels),
                "unit": one.series.unit,
                "before": one.before,
                "after": one.after,
                "change": _comparing_number(one.change),
                "low": _comparing_number(one.low),
                "high": _comparing_number(one.high),
                "verdict": one.verdict,
            }
            for one in compared.changes
        ],
        "findings": [one.as_json() for one in comparison_findings(compared)],
    }


def _comparing_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
