"""The HTML parts of the report. All texts are escaped."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from torchmuster.finding import Finding, Status
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.monitor.alert_watch import AlertNews
from torchmuster.monitor.views.key_figures import key_figures, odd_ranks
from torchmuster.monitor.views.run_picture import RunPicture
from torchmuster.pages import charts
from torchmuster.pages.charts import Axis, Curve
from torchmuster.pages.frame import html_article, html_table
from torchmuster.redaction import harmless
from torchmuster.units import format_seconds

STYLE = charts.RULES + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_MOST_ALERTS = 50
_MOST_EVENTS = 40
_WIDTH, _HEIGHT = 440, 150
_CURVES = {  # title, unit of the axis, whether the axis starts at 0
    "loss": ("loss", "", False),
    "learning_rate": ("learning rate", "", True),
    "samples_per_s": ("samples/s", "", True),
    "tokens_per_s": ("tokens/s", "", True),
    "step_s": ("step time", "s", True),
}
# In the order within a step; their colours are the first ones of the charts.
_PARTS = ("compute", "communication", "data", "checkpoint", "evaluation")
_STATUS = {"critical": Status.FAILURE, "warning": Status.WARNING, "info": Status.NOTE}
_PHASES = {"failed": "failure", "died": "failure", "stopped": "warning", "saved": "note"}
_MOST_RANKS = 64


def escaped_text(text: str) -> str:
    """Return untrusted text as HTML that shows it unchanged."""
    return escape(harmless(text))


def failure_part(phase: str) -> str:
    """Return a phase in the colour of its severity."""
    return f'<b class="{_PHASES.get(phase, "ok")}">{escaped_text(phase)}</b>'


def tiles_part(picture: RunPicture) -> str:
    """Return the key figures of the run and the results of the last evaluation."""
    figures = {
        figure.title: figure.text for figure in key_figures(picture.values, ended=picture.is_over)
    }
    for name, value in picture.evaluation.items():
        figures[f"evaluation: {name}"] = f"{value:.4g}"
    if not figures:
        return '<p class="quiet">no step yet</p>' if not picture.is_over else ""
    cells = [
        f"<div><span>{escaped_text(title)}</span><b>{escaped_text(text)}</b></div>"
        for title, text in figures.items()
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def curves_part(picture: RunPicture) -> str:
    """Return the curves of loss, learning rate, throughput and step time that have data.

    A constant learning rate is only a key figure.
    """
    names = [name for name in _CURVES if picture.curves[name].numbers]
    if len(set(picture.curves["learning_rate"].numbers)) == 1:
        names = [name for name in names if name != "learning_rate"]
    if "tokens_per_s" in names:  # the samples/s curve has the same shape
        names = [name for name in names if name != "samples_per_s"]
    found = [f"<figure>{_curve(name, picture)}</figure>" for name in names]
    return f'<div class="curves">{"".join(found)}</div>' if found else ""


def _curve(name: str, picture: RunPicture) -> str:
    title, unit, from_zero = _CURVES[name]
    return charts.line_chart(
        title,
        Axis(title="step"),
        Axis(title="", unit=unit, from_zero=from_zero),
        [Curve(name="", points=picture.curves[name].points, marked=False)],
        width=_WIDTH,
        height=_HEIGHT,
    )


def times_part(shares: Mapping[str, float], *, rest: str, of_s: float) -> str:
    """Return shares of a time as a bar with a legend; ``rest`` labels the remainder."""
    parts = {name: shares[name] for name in _PARTS if shares.get(name, 0.0) > 0}
    parts[rest] = max(0.0, 1.0 - sum(parts.values()))
    bar, legend = "", ""
    for number, (name, share) in enumerate(parts.items()):
        colour = f"background:var(--c{number})"
        bar += f'<i style="flex:{share:.4f};{colour}" title="{name} {share:.1%}"></i>'
        lasted = format_seconds(share * of_s)
        legend += f'<li><i style="{colour}"></i>{name} {share:.0%} ({lasted})</li>'
    return f'<div class="chart"><div class="bar">{bar}</div><ul class="legend">{legend}</ul></div>'


def alerts_part(alerts: Sequence[AlertNews]) -> str:
    """Return the alerts with their fixes."""
    parts = []
    for news in alerts[:_MOST_ALERTS]:
        finding = Finding(
            name=news.alert.name,
            status=_STATUS[news.alert.severity],
            what=harmless(news.summary),
            why=news.alert.why,
            fix=harmless(news.fix),
        )
        parts.append(html_article(finding))
    if len(alerts) > _MOST_ALERTS:
        parts.append(f"<p>and {len(alerts) - _MOST_ALERTS} more</p>")
    return "".join(parts)


def events_part(picture: RunPicture) -> str:
    """Return the events of the run."""
    if not picture.events:
        return ""
    rows = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_unix_s)), harmless(text))
        for event in picture.events
        if (text := event.text)
    ]
    left_out = len(rows) - _MOST_EVENTS
    note = f'<p class="quiet">{left_out} earlier events not shown</p>' if left_out > 0 else ""
    body = html_table(("when", "what"), rows[-_MOST_EVENTS:]) if rows else ""
    return note + body


def ranks_part(ranks: Sequence[tuple[str, Heartbeat]]) -> str:
    """Return a row per rank with what its last heartbeat says, and a text about outliers."""
    remarks = odd_ranks([heartbeat for _, heartbeat in ranks])
    parts = [f'<p><b class="warning">{escape(remark)}</b></p>' for remark in remarks]
    rows = []
    for host, heartbeat in ranks[:_MOST_RANKS]:
        rows.append(
            (
                str(heartbeat.rank),
                harmless(host),
                "?" if heartbeat.step is None else f"{heartbeat.step:,}",
                _percent(heartbeat.communication_share),
                _percent(heartbeat.data_share),
                f"{heartbeat.silent_s:.0f} s ago",
            )
        )
    head = ("rank", "host", "step", "waits for others", "waits for data", "heartbeat")
    parts.append(html_table(head, rows))
    if len(ranks) > _MOST_RANKS:
        parts.append(f'<p class="quiet">and {len(ranks) - _MOST_RANKS} more ranks</p>')
    return "".join(parts)


def _percent(share: float | None) -> str:
    # The clocks of a step and of its parts are read at different moments, so a sum may be larger.
    return "?" if share is None else f"{100 * min(share, 1.0):.0f} %"
