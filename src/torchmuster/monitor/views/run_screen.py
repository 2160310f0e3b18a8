"""A run on a terminal: progress, curves, time breakdown, ranks, alerts."""

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from torchmuster.checkpoints.foreign import Completeness, Condition
from torchmuster.launch.history import run_state
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint
from torchmuster.monitor.alert_watch import AlertNews
from torchmuster.monitor.views.curve import curve
from torchmuster.monitor.views.key_figures import key_figures, odd_ranks
from torchmuster.monitor.views.run_picture import RunPicture
from torchmuster.redaction import harmless
from torchmuster.units import format_bytes, format_seconds

_CURVE_LINES = 4
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
    for part in (_head, _curves, _times, _ranks, _alerts):
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
    yield from _spares(picture)
    told = [figure.line for figure in key_figures(picture.values, ended=picture.is_over)]
    line = ""
    for item in told:
        if line and len(line) + 2 + len(item) > width:
            yield Text(line)
            line = ""
        line += f"  {item}" if line else item
    if line:
        yield Text(line)
    if not told and not picture.is_over:
        yield Text("no step yet", style="dim")
    if picture.checkpoint is not None:
        yield _checkpoint_line(picture.checkpoint, picture.condition, width)


def _spares(picture: RunPicture) -> Iterator[Text]:
    """Yield the spares that are there now, and the last takeover."""
    spares: list[str] | None = None
    taken = ""
    for event in picture.events:
        host, listed = str(event.facts.get("host", "")), event.facts.get("spares")
        if event.name == "started" and isinstance(listed, list):
            spares = [str(name) for name in listed]
        elif event.name == run_state.SPARE_READY and spares is not None and host not in spares:
            spares.append(host)
        elif event.name in (run_state.SPARE_LOST, run_state.SPARE_REFUSED) and spares is not None:
            spares = [name for name in spares if name != host]
        elif event.name == run_state.TAKEOVER:
            taken = str(event.facts.get("what", ""))
    if spares is not None:
        yield Text(harmless(f"spares: {', '.join(spares) or 'none'}"))
    if taken:
        yield Text(harmless(taken))


def _checkpoint_line(checkpoint: ScriptCheckpoint, condition: Condition | None, width: int) -> Text:
    """Return size, condition and path of the newest checkpoint; a long path is cut at its beginning."""
    size = "" if checkpoint.size_bytes is None else f"{format_bytes(checkpoint.size_bytes)}, "
    line = f"checkpoint {size}{harmless(str(condition))}: "
    path = harmless(checkpoint.path)
    room = max(20, width - len(line))
    is_torn = condition is not None and condition.state is Completeness.TORN
    shown = path if len(path) <= room else f"…{path[1 - room :]}"
    return Text(line + shown, style="yellow" if is_torn else "")


def _curves(picture: RunPicture, width: int) -> Iterator[Text]:
    for name, field in (("loss", "loss"), ("samples/s", "samples_per_s")):
        values, numbers = picture.curves[field].values, picture.curves[field].numbers
        if len(numbers) < 2:
            continue
        # Left: the maximum and the minimum, at their heights.
        labels = [f"{max(numbers):.4g}", name, "", f"{min(numbers):.4g}"]
        lines = curve(values, width=width - _LABEL - 1, height=_CURVE_LINES)
        for label, line in zip(labels, lines, strict=True):
            text = Text(f"{label:>{_LABEL}} ", style="dim")
            text.append(line, style="green" if name == "loss" else "blue")
            yield text


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
    for words in odd_ranks(heartbeats):
        yield Text(f"{'':>{_LABEL}} {words}", style="yellow")


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
