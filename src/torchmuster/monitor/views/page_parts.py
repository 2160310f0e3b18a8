"""The HTML parts of the report. All texts are escaped."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from torchmuster.checkpoints.foreign import Condition
from torchmuster.finding import Finding, Status
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import run_record, run_state
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint
from torchmuster.monitor.alert_watch import AlertNews
from torchmuster.monitor.views.key_figures import key_figures, odd_ranks
from torchmuster.monitor.views.run_picture import RunPicture
from torchmuster.pages import charts
from torchmuster.pages.charts import Axis, Curve, amount_text
from torchmuster.pages.frame import html_article, html_table
from torchmuster.redaction import harmless
from torchmuster.units import format_bytes, format_seconds, plural

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
_CHIPS = (*run_state.ACTIVE, run_state.RESTART, "finished", "failed", "stopped", "saved")
_PHASES = {"failed": "failure", "died": "failure", "stopped": "warning", "saved": "note"}
_MOST_RANKS = 512
_DEEP_SILENCE_S = 30.0
_FAR_BEHIND = 10  # steps; ranks fewer steps behind get a lighter shade


def escaped_text(words: str) -> str:
    """Return untrusted text as HTML that shows it unchanged."""
    return escape(harmless(words))


def failure_part(phase: str) -> str:
    """Return a phase in the colour of its severity."""
    return f'<b class="{_PHASES.get(phase, "ok")}">{escaped_text(phase)}</b>'


def head_part(picture: RunPicture) -> str:
    """Return the job's name, phase, run id and duration."""
    headline = picture.headline.partition("\n")[0]
    return (
        f"<h1>{escaped_text(picture.job)}: {failure_part(picture.phase)}</h1>"
        f'<p class="quiet">{escaped_text(picture.id)}, {format_seconds(picture.lasts_s)}</p>'
        + (f"<p>{escaped_text(headline)}</p>" if headline else "")
    )


def tiles_part(picture: RunPicture) -> str:
    """Return the key figures of the run and the results of the last evaluation."""
    told = [
        (figure.title, figure.text) for figure in key_figures(picture.values, ended=picture.is_over)
    ]
    told += [(f"evaluation: {name}", f"{value:.4g}") for name, value in picture.evaluation.items()]
    if not told:
        return '<p class="quiet">no step yet</p>' if not picture.is_over else ""
    cells = "".join(
        f"<div><span>{escaped_text(name)}</span><b>{escaped_text(value)}</b></div>"
        for name, value in told
    )
    return f'<div class="tiles">{cells}</div>'


def checkpoint_part(picture: RunPicture) -> str:
    """Return the newest checkpoint of the user's own script; "" if there is none."""
    if picture.checkpoint is None:
        return ""
    return checkpoint_table([(picture.checkpoint, picture.condition)], picture.until_unix_s)


def checkpoint_table(
    checkpoints: Iterable[tuple[ScriptCheckpoint, Condition | None]], now_unix_s: float
) -> str:
    """Return checkpoints of a script with their conditions."""
    rows = [
        (
            f"{one.step:,}",
            harmless(one.path),
            harmless(one.library),
            "" if one.size_bytes is None else format_bytes(one.size_bytes),
            f"{format_seconds(max(0.0, now_unix_s - one.at_unix_s))} ago",
            harmless(str(condition or "")),
        )
        for one, condition in checkpoints
    ]
    return html_table(("step", "checkpoint", "library", "size", "saved", "condition"), rows)


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


def times_part(shares: Mapping[str, float], *, rest: str = "", of_s: float | None = None) -> str:
    """Return shares of the time as a bar with a legend; ``rest`` labels the remainder.

    With ``of_s``, the legend also shows the durations.
    """
    parts = [(name, shares[name]) for name in _PARTS if shares.get(name, 0.0) > 0]
    left = 1.0 - sum(share for _, share in parts)
    if rest and left > 0.0005:
        parts.append((rest, left))
    if not parts:
        return ""
    colours = {name: f"var(--c{place})" for place, name in enumerate((*_PARTS, rest))}
    bar = "".join(
        f'<i style="flex:{share:.4f};background:{colours[name]}" title="{name} {share:.1%}"></i>'
        for name, share in parts
    )
    legend = "".join(
        f'<li><i style="background:{colours[name]}"></i>{name} {share:.0%}'
        + (f" ({format_seconds(share * of_s)})" if of_s is not None else "")
        + "</li>"
        for name, share in parts
    )
    return f'<div class="chart"><div class="bar">{bar}</div><ul class="legend">{legend}</ul></div>'


def remark_part(picture: RunPicture) -> str:
    """Return the time breakdown of the newest step line."""
    return f"<p>{escaped_text(picture.remark)}</p>" if picture.remark else ""


def alerts_part(told: Sequence[AlertNews], *, none: str = "") -> str:
    """Return the alerts with their fixes; the text ``none`` if there are none."""
    if not told:
        return f'<p class="quiet">{none}</p>' if none else ""
    shown = "".join(
        html_article(
            Finding(
                name=item.alert.name,
                status=_STATUS[item.alert.severity],
                what=harmless(item.summary),
                why=item.alert.why,
                fix=harmless(item.fix),
            )
        )
        for item in told[:_MOST_ALERTS]
    )
    more = len(told) - _MOST_ALERTS
    return shown + (f"<p>and {more} more</p>" if more > 0 else "")


def events_part(picture: RunPicture) -> str:
    """Return the phases of the run and its events."""
    if not picture.events:
        return ""
    chips = "".join(f"<li>{escaped_text(words)}</li>" for words in _phases(picture))
    rows = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_unix_s)), harmless(words))
        for event in picture.events
        if (words := run_record.event_text(event))
    ]
    left_out = len(rows) - _MOST_EVENTS
    note = f'<p class="quiet">{left_out} earlier events not shown</p>' if left_out > 0 else ""
    body = html_table(("when", "what"), rows[-_MOST_EVENTS:]) if rows else ""
    return f'<ul class="phases">{chips}</ul>{note}{body}'


def _phases(picture: RunPicture) -> Iterator[str]:
    """Yield each phase with its duration, including restarts and ends."""
    shown = [event for event in picture.events if event.name in _CHIPS]
    ends = [*(item.at_unix_s for item in shown[1:]), picture.until_unix_s]
    for one, end_s in list(zip(shown, ends, strict=False))[-_MOST_EVENTS:]:
        begun_s = one.at_unix_s
        if one.name == "running":
            first_s = picture.first_steps.get(begun_s)
            if first_s is not None and begun_s < first_s < end_s:
                # The ranks' processes run, but import torch and build the model.
                yield f"loading {_lasted(first_s - begun_s)}"
                begun_s = first_s
        lasted = _lasted(max(0.0, end_s - begun_s))
        yield f"{one.name} {lasted}" if one.name in run_state.ACTIVE else one.name
    if picture.is_over and (not shown or shown[-1].name != picture.phase):
        yield picture.phase


def _lasted(seconds: float) -> str:
    return amount_text(seconds, "s") if seconds < 60 else format_seconds(seconds)


Ranks = Sequence[tuple[str, Heartbeat]]
# A rank's cell: its shade from 0 to 1, and its value; None if unknown.
Cell = tuple[float, str] | None


def rank_map(ranks: Ranks) -> str:
    """Return a heat map per known quantity of the ranks, and a text about outliers."""
    if not ranks:
        return '<p class="quiet">no recent heartbeat from any rank</p>'
    shown = ranks[:_MOST_RANKS]
    hosts = {host for host, _ in ranks}
    machines = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    left_out = f", the first {_MOST_RANKS} shown" if len(ranks) > _MOST_RANKS else ""
    count = f"{plural(len(ranks), 'rank')}{machines}{left_out}"
    parts = [f'<p class="quiet">{count}; darker = higher</p>']
    for words in odd_ranks([heartbeat for _, heartbeat in ranks]):
        parts.append(f'<p><b class="warning">{escape(words)}</b></p>')
    for title, cells in _maps([heartbeat for _, heartbeat in shown]):
        if any(cell is not None for cell in cells):
            places = "".join(
                _place(host, heartbeat, cell, title)
                for (host, heartbeat), cell in zip(shown, cells, strict=True)
            )
            parts.append(f'<div>{title}</div><div class="heat">{places}</div>')
    return "".join(parts)


def _maps(heartbeats: Sequence[Heartbeat]) -> Iterator[tuple[str, list[Cell]]]:
    yield (
        "waiting for other ranks, % of time",
        _each(heartbeats, lambda heartbeat: _share(heartbeat.communication_share)),
    )
    yield (
        "waiting for data, % of time",
        _each(heartbeats, lambda heartbeat: _share(heartbeat.data_share)),
    )
    first = max(
        (heartbeat.step for heartbeat in heartbeats if heartbeat.step is not None), default=0
    )
    yield (
        "step (darker = further behind the first rank)",
        _each(heartbeats, lambda heartbeat: _step(heartbeat.step, first)),
    )
    yield (
        "seconds since last heartbeat",
        _each(heartbeats, lambda heartbeat: _silence(heartbeat.silent_s)),
    )


def _each(heartbeats: Sequence[Heartbeat], cell: Callable[[Heartbeat], Cell]) -> list[Cell]:
    return [cell(heartbeat) for heartbeat in heartbeats]


def _share(share: float | None) -> Cell:
    # The clocks of a step and of its parts are read at different moments.
    return None if share is None else (share, f"{100 * min(share, 1.0):.0f}")


def _step(step: int | None, first: int) -> Cell:
    return None if step is None else ((first - step) / _FAR_BEHIND, _short(step))


def _silence(silent_s: float) -> Cell:
    return silent_s / _DEEP_SILENCE_S, f"{silent_s:.0f}"


def _short(step: int) -> str:
    """Return a number of at most six characters: 12,345 or 1.23M."""
    return f"{step:,}" if step < 1_000_000 else f"{step / 1e6:.2f}M"


def _place(host: str, heartbeat: Heartbeat, cell: Cell, title: str) -> str:
    name = escape(harmless(f"rank {heartbeat.rank} on {host}: {title}"))
    if cell is None:
        return f'<span class="unknown" title="{name}"><small>{heartbeat.rank}</small>?</span>'
    shade = min(1.0, max(0.0, cell[0]))
    return f'<span style="--heat:{shade:.2f}" title="{name}"><small>{heartbeat.rank}</small>{cell[1]}</span>'
