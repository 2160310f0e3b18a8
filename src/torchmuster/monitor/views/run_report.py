"""The report of a run, from its folder alone: command, result, what to do; then the figures."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from torchmuster import untrusted
from torchmuster.checkpoints.manifest import Manifest, committed_manifests
from torchmuster.checkpoints.store import FolderStore
from torchmuster.finding import Status
from torchmuster.launch.history.failure_report import FailureReport, failure_report_of
from torchmuster.launch.job import as_people_know_it
from torchmuster.monitor import catalogue
from torchmuster.monitor.views import page_parts
from torchmuster.monitor.views.page_parts import escaped_text
from torchmuster.monitor.views.run_picture import RunPicture, RunWatch
from torchmuster.pages import frame
from torchmuster.pages.frame import html_article, html_details, html_table
from torchmuster.redaction import harmless, printable, redact_text
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_bytes, format_seconds

# The user waits for the report at the end of a run: what is not read in time is left out with a
# note.
_READ_WITHIN_S = 8.0
_MOST_SETTINGS = 64 * 1024
_MOST_CHECKPOINTS = 20
_REST = "other"  # starting, repeated steps, waiting, shutdown


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The data of a report."""

    picture: RunPicture
    account: FailureReport
    saved: Sequence[Manifest]
    settings: str
    is_whole: bool  # whether all step lines were read


def run_report(run: RunFolder) -> str:
    """Return the HTML page. Data from the run is shown as text, never as markup."""
    content = _read(run)
    picture = content.picture
    title = f"{harmless(picture.job)}: {picture.phase}"
    return frame.html_page(title, [part for part in _page(content) if part], style=page_parts.STYLE)


def _read(run: RunFolder) -> _Content:
    watch = RunWatch(run)
    account = failure_report_of(run)
    state = account.record.state
    # In a run that has ended, the last heartbeats are those at its end.
    now = time.time() if state is None or state.active else state.since_unix_s
    watch.catch_up(_READ_WITHIN_S)
    picture = watch.look(now)
    saved: list[Manifest] = []
    with contextlib.suppress(Exception):  # other commands report damaged checkpoints
        saved = committed_manifests(FolderStore(run.checkpoints))
    settings = ""
    with (
        contextlib.suppress(OSError, untrusted.Unreadable),
        untrusted.open_regular(run.config) as file,
    ):
        settings = file.read(_MOST_SETTINGS).decode("utf-8", errors="replace")
    return _Content(
        picture=picture,
        account=account,
        saved=saved,
        settings=settings,
        is_whole=not watch.is_behind,
    )


def _page(content: _Content) -> Iterator[str]:
    picture, record = content.picture, content.account.record
    started = record.state.started_unix_s if record.state else None
    when = "" if started is None else f", launched {_clock(started)}"
    yield f"<h1>{escaped_text(picture.job)}: {page_parts.failure_part(picture.phase)}</h1>"
    yield f'<p class="quiet">run {escaped_text(picture.id)}{when}</p>'
    yield _answer(content)
    yield page_parts.tiles_part(picture)
    yield from (
        html_article(finding)
        for finding in content.account.findings
        if finding.status is not Status.OK
    )
    yield _section("metrics by step", page_parts.curves_part(picture))
    if not content.is_whole:
        yield f"<p>The curves end at step {_steps(picture)}: reading the rest takes too long.</p>"
    yield _section("time breakdown, whole run", _times(picture))
    yield _section("alerts", page_parts.alerts_part(picture.alerts))
    yield _section("events", page_parts.events_part(picture))
    yield _section("checkpoints", _checkpoints(content.saved))
    ranks = page_parts.ranks_part(picture.ranks) if picture.ranks else ""
    yield _section("ranks at their last heartbeat", ranks)
    if content.settings:
        body = f"<pre>{escape(harmless(redact_text(content.settings)))}</pre>"
        yield html_details("settings", body)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _answer(content: _Content) -> str:
    """Return the command, the result and what to do, in a few lines."""
    job = content.account.record.job
    command = "unknown: job.json is missing"
    if job:
        command = f"muster {printable(as_people_know_it(job.typed, job.command, job.flags))}"
    fixes = [finding.fix for finding in content.account.findings]
    to_do = "\n".join(dict.fromkeys(fix for fix in (*fixes, content.picture.remark) if fix))
    rows = (("command", command), ("result", _result(content)), ("to do", to_do or "nothing"))
    cells = "".join(f"<dt>{name}</dt><dd>{escaped_text(text)}</dd>" for name, text in rows)
    return f'<dl class="answer">{cells}</dl>'


def _result(content: _Content) -> str:
    """Return the outcome and the most important figures."""
    picture, values = content.picture, content.picture.values
    first = [finding.what for finding in content.account.findings[:1]]
    state = content.account.record.state
    resumed = " since it was resumed" if state is not None and state.launches > 1 else ""
    parts = [f"duration {format_seconds(picture.lasts_s)}{resumed}"]
    if catalogue.STEPS in values:
        parts.append(f"{_steps(picture)} steps")
        if (loss := values.get(catalogue.LOSS)) is not None:
            parts.append("loss NaN" if math.isnan(loss) else f"loss {loss:.4g}")
        if (rate := values.get(catalogue.SAMPLES_RATE)) is not None:
            parts.append(f"{rate:,.1f} samples/s at the end")
        if picture.lasts_s > 0:
            computing = min(1.0, picture.spent_s["compute"] / picture.lasts_s)
            parts.append(f"{computing:.0%} of the time in compute")
    else:
        parts.append("no step lines")
    parts.append(_counted(int(values.get(catalogue.RUN_RESTARTS, 0)), "restart"))
    if content.saved:
        parts.append(f"{_counted(len(content.saved), 'checkpoint')} kept")
    return "\n".join([*first, ", ".join(parts)])


def _times(picture: RunPicture) -> str:
    """Return the time breakdown of the whole run, not only of the last steps."""
    whole_s = max(picture.lasts_s, sum(picture.spent_s.values()))
    if whole_s <= 0 or not any(picture.spent_s.values()):
        return ""
    shares = {name: spent_s / whole_s for name, spent_s in picture.spent_s.items()}
    note = f"{_REST}: startup, repeated or lost steps, waiting, shutdown"
    return page_parts.times_part(shares, rest=_REST, of_s=whole_s) + f'<p class="quiet">{note}</p>'


def _checkpoints(saved: Sequence[Manifest]) -> str:
    if not saved:
        return ""
    rows = [
        (f"{item.step:,}", item.name, format_bytes(item.size_bytes), _clock(item.made_unix_s))
        for item in saved[:_MOST_CHECKPOINTS]
    ]
    more = len(saved) - _MOST_CHECKPOINTS
    note = f'<p class="quiet">and {more} older</p>' if more > 0 else ""
    return html_table(("step", "name", "size", "made"), rows) + note


def _steps(picture: RunPicture) -> str:
    return f"{picture.values.get(catalogue.STEPS, 0.0):,.0f}"


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
