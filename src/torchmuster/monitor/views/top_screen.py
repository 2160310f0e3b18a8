"""A host and its ranks on a terminal: the parts of ``muster top`` as lines of text."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from torchmuster.launch.history import run_state
from torchmuster.monitor import catalogue
from torchmuster.monitor.views.bars import QUIET, VERY_WIDE, WRONG, bar
from torchmuster.monitor.views.key_figures import key_figures
from torchmuster.monitor.views.run_screen import alert_lines
from torchmuster.monitor.views.top_picture import HostFigures, RunFigures, TopPicture
from torchmuster.monitor.views.top_tables import device_lines, rank_lines, short_name
from torchmuster.redaction import harmless
from torchmuster.units import GiB, format_bytes, plural

_MOST_RUNS = 4
_ENDED_BADLY = ("failed", "died")


@dataclass(frozen=True, kw_only=True)
class TopView:
    """The user's view settings."""

    order: str = "rank"
    reverse: bool = False
    cells: bool | None = None  # for devices; None: if there are many


@dataclass(frozen=True, kw_only=True)
class TopParts:
    """The parts from top to bottom. The first line of ``ranks`` is the header."""

    head: list[Text]
    devices: list[Text]
    ranks: list[Text]
    alerts: list[Text]


def top_parts(picture: TopPicture, width: int, view: TopView) -> TopParts:
    """Return all parts, in lines of at most this width."""
    ranks = rank_lines(picture.ranks, width, order=view.order, reverse=view.reverse)
    return TopParts(
        head=_cut([*_top_screen_machine(picture, width), *_runs(picture, width)], width),
        devices=_cut(device_lines(picture.devices, width, cells=view.cells), width),
        ranks=_cut(ranks or [Text(_no_ranks(picture), style=QUIET)], width),
        alerts=_cut(list(alert_lines(picture.alerts)), width),
    )


def top_screen(picture: TopPicture, width: int, view: TopView) -> Text:
    """Return all parts as one text."""
    made = top_parts(picture, width, view)
    lines: list[Text] = []
    for part in (made.head, made.devices, made.ranks, made.alerts):
        lines += [Text(), *part] if lines and part else part
    text = Text("\n").join(lines)
    text.no_wrap = True
    return text


def _cut(lines: list[Text], width: int) -> list[Text]:
    return [line[:width] for line in lines]


def _top_screen_machine(picture: TopPicture, width: int) -> Iterator[Text]:
    title = Text(harmless(picture.host.name), style="bold")
    words = [time.strftime("%H:%M:%S", time.localtime(picture.at_unix_s))]
    words += _devices_in_words(picture)
    if picture.node.driver_version and width >= 100:
        words.append(f"driver {picture.node.driver_version}")
    title.append("".join(f"  {word}" for word in words), style="not bold")
    yield title
    yield _load(picture.host, width)


def _devices_in_words(picture: TopPicture) -> list[str]:
    if not picture.devices:
        return ["no GPU"]
    names = Counter(short_name(one.device) for one in picture.devices)
    hosts = len({one.host for one in picture.devices})
    several = f" on {hosts} hosts" if hosts > 1 else ""
    listed = ", ".join(f"{count} x {name}" for name, count in names.most_common(3))
    return [f"{listed}{' …' if len(names) > 3 else ''}{several}"]


def _load(host: HostFigures, width: int) -> Text:
    """Return the host's load, as much of it as fits."""
    line = Text()
    for part in _load_parts(host, 18 if width >= VERY_WIDE else 10):
        if line.cell_len + part.cell_len <= width:
            line.append_text(part).append("  ")
    line.rstrip()
    return line


def _load_parts(host: HostFigures, length: int) -> Iterator[Text]:
    values = host.values
    used = values.get(catalogue.HOST_CPU)
    if used is not None:
        part = Text().append("cpu ", style=QUIET).append_text(bar(used, length))
        yield part.append(f"{used:>5.0%}")
    total = values.get(catalogue.HOST_MEMORY)
    free = values.get(catalogue.HOST_MEMORY_AVAILABLE)
    if total and free is not None:
        part = Text().append("memory ", style=QUIET).append_text(bar(1 - free / total, length))
        yield part.append(f" {(total - free) / GiB:.0f}/{total / GiB:.0f} GiB")
    if waiting := values.get(catalogue.QUEUE_REQUESTS):
        yield Text().append("queue ", style=QUIET).append(f"{waiting:.0f} waiting")
    if borrowed := values.get(catalogue.GPUS_BORROWED):
        yield Text().append("borrowed ", style=QUIET).append(plural(int(borrowed), "GPU"))
    disk = values.get(catalogue.HOST_DISK_FREE)
    if disk is not None:
        yield Text().append("disk ", style=QUIET).append(f"{format_bytes(int(disk))} free")
    if host.received_bytes_s is not None and host.sent_bytes_s is not None:
        received, sent = (
            format_bytes(int(host.received_bytes_s)),
            format_bytes(int(host.sent_bytes_s)),
        )
        yield Text().append("network ", style=QUIET).append(f"in {received}/s  out {sent}/s")


def _runs(picture: TopPicture, width: int) -> Iterator[Text]:
    for run in picture.runs[:_MOST_RUNS]:
        yield _run_top_screen(run, picture, width)
    if len(picture.runs) > _MOST_RUNS:
        yield Text(f"and {len(picture.runs) - _MOST_RUNS} more runs", style=QUIET)


def _run_top_screen(run: RunFigures, picture: TopPicture, width: int) -> Text:
    line = Text(harmless(run.job), style="bold")
    line.append(f"  {run.phase}", style=WRONG if run.phase in _ENDED_BADLY else "not bold")
    ranks = sum(one.run == run.id for one in picture.ranks)
    words = [f"{ranks} rank{'s' * (ranks != 1)}"] if ranks else []
    for word in [*words, *(one.line for one in key_figures(run.values))]:
        if line.cell_len + 2 + len(word) > width:
            break
        line.append(f"  {word}", style="not bold")
    return line


def _no_ranks(picture: TopPicture) -> str:
    if any(one.phase in run_state.ACTIVE for one in picture.runs):
        return "ranks: no heartbeat yet"
    return "ranks: no active run in this folder (--runs DIR selects another folder)"
