"""A profile as terminal output and as one self-contained HTML page."""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from torchmuster.finding import Status, render
from torchmuster.pages.charts import Bar, amount_text, bar_chart
from torchmuster.pages.columns import aligned_columns
from torchmuster.pages.frame import html_article, html_page
from torchmuster.profile.analysis import SHARES, Profile
from torchmuster.profile.causes import Cause, findings_of
from torchmuster.redaction import harmless
from torchmuster.units import plural

_MOST_BARS = 64
_MOST_COLUMNS = 6
_MOST_OPERATIONS = 4
_WHOLE_CAUSES = 2
_SHOWN_FROM = 0.005  # of a step
_LONGEST_NAME = 60


def screen(
    profile: Profile,
    causes: Sequence[Cause],
    folder: Path,
    *,
    width: int = 100,
    colour: bool = False,
) -> str:
    """Return the terminal output: what to do, where the time went, and how that was measured."""
    findings = findings_of(profile, causes)
    blocks = [_wrapped(summary(profile), width)]
    whole = [finding for finding in findings if finding.status is not Status.NOTE][:_WHOLE_CAUSES]
    blocks.append(render(whole, width=width, colour=colour))
    for finding in findings:
        if finding not in whole:
            blocks.append(_wrapped(f"also: {finding.what}", width))
    blocks.append("\n".join(_share_table(profile)))
    blocks.append("\n".join(_wrapped(note, width) for note in notes(profile)))
    blocks.append(f"page and traces (ui.perfetto.dev opens them): {folder}")
    return "\n\n".join(block for block in blocks if block)


def summary(profile: Profile) -> str:
    """Return one sentence about the profiled steps."""
    facts, ranks = profile.facts[0], len(profile.facts)
    device = "the CPU" if facts.device == "cpu" else facts.device_name
    text = (
        f"{plural(len(profile.steps), 'step')} of {plural(ranks, 'rank')} on {device}: "
        f"a step takes {amount_text(profile.step_s, 's')}"
    )
    if not profile.step_s:
        return text
    samples = facts.loader.samples_per_batch if facts.loader is not None else None
    if samples:
        batches = max(profile.most_times("backward"), 1)
        text += f", {amount_text(samples * batches * ranks / profile.step_s, 'samples/s')}"
    return text


def notes(profile: Profile) -> Iterator[str]:
    """Yield what the operations show, and what could not be recorded."""
    for facts in profile.facts:
        trace = facts.trace
        if trace is not None and trace.top:
            names = []
            for operation in trace.top[:_MOST_OPERATIONS]:
                name = textwrap.shorten(operation.name, _LONGEST_NAME, placeholder="…")
                seconds = amount_text(operation.self_s, "s")
                names.append(f"{name} {seconds} in {operation.calls:,.0f}")
            yield f"operations of rank {facts.rank}: {'; '.join(names)}"
            break
    for facts in profile.facts:
        for note in facts.notes:
            yield f"rank {facts.rank}: {note}"


def _seen_shares(profile: Profile) -> list[str]:
    """Return the shares that are not 0 on every rank, the largest first."""
    largest = {}
    for name in SHARES:
        largest[name] = max(profile.part(facts.rank, name) for facts in profile.facts)
    seen = [name for name in SHARES if largest[name] >= _SHOWN_FROM]
    return sorted(seen, key=lambda name: -largest[name])


def _share_table(profile: Profile) -> Iterator[str]:
    """Yield the table of the first ranks and the straggler."""
    ranks = [facts.rank for facts in profile.facts][:_MOST_COLUMNS]
    if profile.straggler is not None and profile.straggler.rank not in ranks:
        ranks[-1] = profile.straggler.rank
    rows = [["of a step", *(f"rank {rank}" for rank in ranks)]]
    for name in _seen_shares(profile):
        rows.append([SHARES[name], *(f"{profile.part(rank, name):.0%}" for rank in ranks)])
    yield from aligned_columns(rows, right=True)
    if len(profile.facts) > len(ranks):
        yield f"and {len(profile.facts) - len(ranks)} more ranks in the chart"


def page(profile: Profile, causes: Sequence[Cause]) -> str:
    """Return the HTML page. Data from the training is shown as text, never as markup."""
    parts = ["<h1>muster profile</h1>", f"<p>{escape(summary(profile))}</p>"]
    parts += map(html_article, findings_of(profile, causes))
    parts.append(f"<figure>{shares_chart(profile)}</figure>")
    lines = "\n".join([*_share_table(profile), "", *notes(profile)])
    parts.append(f"<pre>{escape(harmless(lines))}</pre>")
    return html_page("muster profile", parts)


def shares_chart(profile: Profile) -> str:
    """Draw the time breakdown of a step, one bar per rank."""
    names = _seen_shares(profile)
    bars = []
    for facts, shares in list(zip(profile.facts, profile.shares, strict=True))[:_MOST_BARS]:
        parts = {SHARES[name]: shares[name] for name in names}
        bars.append(Bar(name=f"rank {facts.rank}", parts=parts))
    return bar_chart("time breakdown of a step", "s", bars)


def _wrapped(sentence: str, width: int) -> str:
    return textwrap.fill(harmless(sentence), width, break_long_words=False, break_on_hyphens=False)
