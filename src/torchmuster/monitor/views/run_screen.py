"""A run on a terminal: progress, time breakdown, ranks, alerts."""

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from torchmuster.monitor.alert_watch import AlertNews
from torchmuster.monitor.views.key_figures import key_figures, odd_ranks
from torchmuster.monitor.views.run_picture import RunPicture
from torchmuster.redaction import harmless
from torchmuster.units import format_seconds

_LABEL = 12
# Each rank is a shade, so that the map is readable without colours.
_SHADES = " ░▒▓█"
_PARTS = {
    "compute": ("█", "green"),
    "communication": ("▓", "blue"),
    "data": ("▒", "yellow"),
    "checkpoint": ("░", "magenta"),
    "evaluation": ("·", "cyan"),
}
_SEVERITY = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_MOST_ALERTS = 6
_MOST_RANKS = 512


def run_screen(picture: RunPicture, width: int) -> Text:
    """Return the whole view as lines of at most this width."""
    lines: list[Text] = []
    for part in (_head, _times, _ranks, _alerts):
        shown = list(part(picture, width))
        lines += [Text(), *shown] if lines and shown else shown
    text = Text("\n").join(line[:width] for line in lines)
    text.no_wrap = True
    return text


def _head(picture: RunPicture, width: int) -> Iterator[Text]:
    style = {"running": "green", "finished": "green", "failed": "bold red", "died": "bold red"}
    title = Text(f"{harmless(picture.job)}  ", style="bold")
    title.append(picture.phase, style=style.get(picture.phase, "yellow"))
    title.append(f"  {format_seconds(picture.lasts_s)}  {picture.id}", style="dim")
    yield title
    if picture.headline:
        yield Text(harmless(picture.headline.partition("\n")[0]))
    figures = [figure.line for figure in key_figures(picture.values, ended=picture.is_over)]
    line = ""
    for item in figures:
        if line and len(line) + 2 + len(item) > width:
            yield Text(line)
            line = ""
        line += f"  {item}" if line else item
    if line:
        yield Text(line)
    if not figures and not picture.is_over:
        yield Text("no step yet", style="dim")


def _times(picture: RunPicture, width: int) -> Iterator[Text]:
    if not picture.shares:
        return
    room = width - _LABEL - 1
    bar = Text(f"{'time':>{_LABEL}} ", style="dim")
    legend = Text(" " * (_LABEL + 1))
    done = 0.0
    for part, (sign, colour) in _PARTS.items():
        share = picture.shares.get(part, 0.0)
        places = round((done + share) * room) - round(done * room)
        bar.append(sign * places, style=colour)
        done += share
        if share >= 0.005:
            legend.append(f"{sign} {part} {share:.0%}  ", style=colour)
    yield bar
    yield legend


def _ranks(picture: RunPicture, width: int) -> Iterator[Text]:
    if not picture.ranks:
        return
    room = width - _LABEL - 1
    heartbeats = [heartbeat for _, heartbeat in picture.ranks[:_MOST_RANKS]]
    hosts = {host for host, _ in picture.ranks}
    several = "" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    known = any(heartbeat.data_share is not None for heartbeat in heartbeats)
    what = ": share of time waiting" if known else ""
    yield Text(f"{'ranks':>{_LABEL}} {len(picture.ranks)}{several}{what}", style="dim")
    for name, field in (("for others", "communication_share"), ("for data", "data_share")):
        shares: list[float | None] = [getattr(heartbeat, field) for heartbeat in heartbeats]
        if all(share is None for share in shares):
            continue
        cells = "".join(_shade(share) for share in shares)
        for at in range(0, len(cells), room):
            label = name if at == 0 else ""
            text = Text(f"{label:>{_LABEL}} ", style="dim")
            text.append(cells[at : at + room], style="blue" if field[0] == "c" else "yellow")
            yield text
    for remark in odd_ranks(heartbeats):
        yield Text(f"{'':>{_LABEL}} {remark}", style="yellow")


def _shade(share: float | None) -> str:
    if share is None:
        return "?"
    return _SHADES[min(len(_SHADES) - 1, math.ceil(share * (len(_SHADES) - 1)))]


def _alerts(picture: RunPicture, width: int) -> Iterator[Text]:
    hang = picture.hang
    if hang is not None:
        yield Text(f"{'hang':>{_LABEL}} {harmless(hang)}", style="bold yellow")
    yield from alert_lines(picture.alerts)
    if not picture.alerts and hang is None and not picture.is_over:
        yield Text(f"{'alerts':>{_LABEL}} none", style="dim")


def alert_lines(alerts: Sequence[AlertNews]) -> Iterator[Text]:
    """Yield summary and fix of the first alerts, and the number of the others."""
    for news in alerts[:_MOST_ALERTS]:
        text = Text(f"{news.alert.severity:>{_LABEL}} ", style=_SEVERITY[news.alert.severity])
        text.append(harmless(news.summary))
        yield text
        yield Text(f"{'fix':>{_LABEL}} {harmless(news.fix)}", style="dim")
    if len(alerts) > _MOST_ALERTS:
        yield Text(f"{'':>{_LABEL}} and {len(alerts) - _MOST_ALERTS} more alerts")
