"""A profile as terminal output and as one self-contained HTML page."""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from torchmuster.bench.profile.advice import Advice, nothing_to_fix
from torchmuster.bench.profile.analysis import Analysis, RankAnalysis
from torchmuster.bench.profile.changes import ChangeTrial
from torchmuster.bench.profile.shares import WORDS
from torchmuster.bench.profile.step_picture import Piece
from torchmuster.diagnose.report.terminal import aligned_columns
from torchmuster.finding import render
from torchmuster.pages import frame
from torchmuster.pages.charts import (
    Axis,
    Curve,
    Stack,
    amount_text,
    line_chart,
    stacked_chart,
    svg_chart,
)
from torchmuster.pages.frame import html_article, html_details, html_table
from torchmuster.redaction import harmless
from torchmuster.units import plural

_MOST_BARS = 64
_MOST_TIMELINES = 16
_MOST_CURVES = 6
_LEFT, _WIDTH, _TOP, _ROW = 70, 860, 40, 40


def shares_picture(analysis: Analysis) -> str:
    """Draw the time breakdown of a step, one bar per rank."""
    shown = analysis.ranks[:_MOST_BARS]
    stacks = [
        Stack(
            name=f"rank {one.facts.rank}",
            parts={WORDS[name]: one.shares.by_name()[name] for name in _profile_names(analysis)},
        )
        for one in shown
    ]
    return stacked_chart("time breakdown of a step", "s", stacks)


def memory_picture(analysis: Analysis) -> str | None:
    """Draw memory over time, if it was recorded."""
    found = [(one, one.trace.memory) for one in analysis.ranks if one.trace and one.trace.memory]
    if not found:
        return None
    on_device = found[0][0].trace is not None and found[0][0].trace.on_device
    title = "allocated memory" if on_device else "memory allocated since the profiler started"
    curves = [
        Curve(name=f"rank {one.facts.rank}", points=points) for one, points in found[:_MOST_CURVES]
    ]
    return line_chart(title, Axis(title="seconds", unit="s"), Axis(title="bytes", unit="B"), curves)


def step_picture(analysis: Analysis) -> str | None:
    """Draw one step of each rank over time: its activity, and below it messages in flight."""
    shown = [one for one in analysis.ranks if one.trace and one.trace.picture][:_MOST_TIMELINES]
    if not shown:
        return None
    longest_s = max(_took_s(one) for one in shown)
    body: list[str] = []
    names = _profile_names(analysis)
    for place, one in enumerate(shown):
        picture = one.trace.picture if one.trace else None
        if picture is None:
            continue
        y = _TOP + place * _ROW
        body.append(_profile_text(_LEFT - 8, y + 15, f"rank {one.facts.rank}", "end"))
        body += _profile_row(picture.doing, names, y, 20, longest_s)
        body += _profile_row(picture.sending, names, y + 23, 6, longest_s)
    bottom = _TOP + len(shown) * _ROW
    for part in range(5):
        at_s = longest_s * part / 4
        body.append(
            _profile_text(_across(at_s, longest_s), bottom + 12, amount_text(at_s, "s"), "middle")
        )
    body.append(_profile_text(14, bottom + 34, "colours as above; thin rows: messages in flight"))
    return svg_chart("one step over time", _WIDTH, bottom + 48, body)


def _profile_names(analysis: Analysis) -> list[str]:
    """Return the shares that any chart shows, in the order of their colours."""
    drawn = {
        piece.name
        for one in analysis.ranks
        if one.trace and one.trace.picture
        for piece in one.trace.picture.doing
    }
    return [
        name
        for name in WORDS
        if name in drawn or any(one.shares.part(name) > 0 for one in analysis.ranks)
    ]


def _took_s(one: RankAnalysis) -> float:
    return one.trace.picture.took_s if one.trace and one.trace.picture else 0.0


def _across(at_s: float, longest_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 40) * at_s / longest_s


def _profile_row(
    pieces: Sequence[Piece], names: Sequence[str], y: float, height: float, longest_s: float
) -> list[str]:
    found = []
    for one in pieces:
        begin, end = _across(one.begin_s, longest_s), _across(one.end_s, longest_s)
        colour = f"var(--c{names.index(one.name)})" if one.name in names else "var(--ink)"
        tip = f"{WORDS.get(one.name, one.name)}: {amount_text(one.end_s - one.begin_s, 's')}"
        found.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 0.5):.1f}" height="{height}" '
            f'style="fill:{colour}"><title>{escape(tip)}</title></rect>'
        )
    return found


def _profile_text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


_MOST_RANKS = 6
_MOST_OPERATIONS = 4
_WHOLE_ADVICE = 2
_SEEN_FROM = 0.005
_LONGEST_NAME = 60


def profile_screen(
    analysis: Analysis,
    advice: Sequence[Advice],
    proof: ChangeTrial | None,
    folder: Path,
    *,
    width: int = 100,
    colour: bool = False,
) -> str:
    """Return the terminal output; the page has all ranks, operations and charts."""
    blocks = [
        [*_wrapped(profile_question(analysis), width)],
        [*_shares(analysis)],
        [*_remarks(analysis, width)],
        [*_advice(analysis, advice, width, colour)],
    ]
    if proof is not None:
        blocks.append([*_wrapped(proved_changes(advice, proof), width)])
    blocks.append([f"page and traces (ui.perfetto.dev opens them): {folder}"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def profile_question(analysis: Analysis) -> str:
    """Return one sentence about the profiled steps."""
    first, ranks = analysis.facts[0], len(analysis.facts)
    where = "the CPU" if first.device == "cpu" else first.device_name
    words = (
        f"{plural(len(analysis.steps), 'step')} of {plural(ranks, 'rank')} on {where}: "
        f"a step takes {amount_text(analysis.step_s, 's')}"
    )
    samples = first.loader.samples_per_batch if first.loader is not None else None
    if samples and analysis.step_s:
        each = max(one.micro_batches for step in analysis.steps for one in step.values()) or 1
        words += f", {amount_text(samples * each * ranks / analysis.step_s, 'samples/s')}"
    if first.flops_per_step and analysis.step_s:
        words += f", {amount_text(first.flops_per_step / analysis.step_s, 'FLOP/s')} a rank"
    return words


def proved_changes(advice: Sequence[Advice], proof: ChangeTrial) -> str:
    """Return the predicted and the measured gain of a change."""
    predicted = next((one.gain for one in advice if one.change == proof.change), None)
    words = "" if predicted is None else f"predicted {predicted:.2f}x, "
    return (
        f"applied: {proof.change}: {words}measured {proof.gain:.2f}x "
        f"(from {proof.low:.2f}x to {proof.high:.2f}x in {plural(len(proof.after_s), 'run')})"
    )


def seen_shares(analysis: Analysis) -> list[str]:
    """Return the names of the shares that are not 0 on every rank."""
    return [
        name for name in WORDS if any(one.shares.part(name) >= _SEEN_FROM for one in analysis.ranks)
    ]


def profile_remarks(analysis: Analysis) -> Iterator[str]:
    """Yield sentences about how the figures were obtained, and what is missing."""
    factor = analysis.profiler_factor
    if factor is not None:
        on_device = any(one.trace is not None and one.trace.on_device for one in analysis.ranks)
        which = "with" if on_device else "without"
        cost = (
            f"makes a step {factor:.2f}x as long"
            if factor > 1.05
            else "did not slow the steps down"
        )
        yield f"the shares come from steps {which} the profiler, which {cost}"
    for one in analysis.ranks:
        yield from _of_trace(one)
        yield from (f"rank {one.facts.rank}: {text}" for text in one.facts.trouble)


def _of_trace(one: RankAnalysis) -> Iterator[str]:
    rank, trace, kept = one.facts.rank, one.trace, one.facts.trace
    if kept is not None and kept.why_cut:
        yield f"the trace of rank {rank} was cut: {kept.why_cut}"
    if one.no_trace:
        yield f"the trace of rank {rank} could not be analyzed: {one.no_trace.splitlines()[0]}"
    if trace is None:
        return
    if trace.left_out:
        yield (
            f"the trace of rank {rank} is large; {len(trace.steps)} of its "
            f"{len(trace.steps) + len(trace.left_out)} steps were analyzed"
        )
    if trace.shortened:
        yield f"the traced step of rank {rank} is very large; only its beginning was analyzed"
    if trace.truncated:
        yield f"the trace of rank {rank} is truncated; only the part before that was analyzed"
    if trace.unreadable:
        yield f"{plural(trace.unreadable, 'event')} in the trace of rank {rank} could not be read"


def _shares(analysis: Analysis) -> Iterator[str]:
    names = seen_shares(analysis)
    shown = _profile_shown(analysis)
    head = ["of a step", *(f"rank {one.facts.rank}" for one in shown)]
    rows = [
        [WORDS[name], *(f"{one.shares.part(name):.0%}" for one in shown)]
        for name in sorted(names, key=lambda name: -max(one.shares.part(name) for one in shown))
    ]
    yield from aligned_columns([head, *rows], right=True)
    if len(analysis.ranks) > len(shown):
        yield f"and {len(analysis.ranks) - len(shown)} more ranks on the page"


def _profile_shown(analysis: Analysis) -> list[RankAnalysis]:
    """Return the first ranks and the straggler."""
    slow = None if analysis.slow is None else analysis.slow.rank
    first = list(analysis.ranks[:_MOST_RANKS])
    if slow is not None and slow not in {one.facts.rank for one in first}:
        first[-1] = next(one for one in analysis.ranks if one.facts.rank == slow)
    return first


def _remarks(analysis: Analysis, width: int) -> Iterator[str]:
    traced = next((one for one in analysis.ranks if one.trace is not None), None)
    if traced is not None and traced.trace is not None and traced.trace.operations.top:
        made_of = "; ".join(
            f"{shortened(one.name)} {amount_text(one.self_s, 's')} in {one.calls:,.0f}"
            for one in traced.trace.operations.top[:_MOST_OPERATIONS]
        )
        yield from _wrapped(f"operations of rank {traced.facts.rank}: {made_of}", width)
        small = traced.trace.operations.smallness
        if small is not None:
            yield from _wrapped(describe_smallness(traced), width)
    for sentence in profile_remarks(analysis):
        yield from _wrapped(sentence, width)


def describe_smallness(one: RankAnalysis) -> str:
    """Return whether a step is launch-bound, as text."""
    small = None if one.trace is None else one.trace.operations.smallness
    if small is None:
        return ""
    verdict = "launch-bound" if small.bound else "not launch-bound"
    return (
        f"{verdict}: {small.calls:,.0f} operations per step, the median takes "
        f"{amount_text(small.median_s, 's')}; "
        f"operations under 20 µs take {small.small_part:.0%} of the time"
    )


def shortened(name: str) -> str:
    """Shorten a kernel's name, which can be very long."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _advice(
    analysis: Analysis, advice: Sequence[Advice], width: int, colour: bool
) -> Iterator[str]:
    if not advice:
        yield render([nothing_to_fix(analysis)], width=width, colour=colour)
    for one in advice[:_WHOLE_ADVICE]:
        yield render([one.finding], width=width, colour=colour)
    for one in advice[_WHOLE_ADVICE:]:
        yield from _wrapped(f"also     {one.finding.what}", width)


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(harmless(sentence), width, break_long_words=False, break_on_hyphens=False)


_MOST_ROWS = 1000


def profile_page(analysis: Analysis, advice: Sequence[Advice], proof: ChangeTrial | None) -> str:
    """Return the HTML page. Data from the training is shown as text, never as markup."""
    told = [one.finding for one in advice] or [nothing_to_fix(analysis)]
    known = sum(one.gain is not None for one in advice)
    verdict = '<b class="ok">nothing to fix</b>'
    if known:
        verdict = f'<b class="warning">{known} to fix</b>'
    elif advice:
        verdict = f'<b class="note">{len(advice)} to try</b>'
    parts = [f"<h1>muster profile: {verdict}</h1>", f"<p>{escape(profile_question(analysis))}</p>"]
    if proof is not None:
        parts.append(f"<p>{escape(proved_changes(advice, proof))}</p>")
    parts += [html_article(one) for one in told]
    pictures = (shares_picture(analysis), step_picture(analysis), memory_picture(analysis))
    parts += [f"<figure>{one}</figure>" for one in pictures if one]
    parts.append(
        html_details("time breakdown of a step, by rank", _page_shares(analysis), opened=True)
    )
    for one in analysis.ranks:
        if one.trace is not None and one.trace.operations.top:
            body = f"<p>{escape(describe_smallness(one))}</p>{_operations(one)}"
            title = f"operations of rank {one.facts.rank}"
            parts.append(html_details(title, body, opened=one is analysis.ranks[0]))
    notes = "".join(f"<li>{escape(one)}</li>" for one in profile_remarks(analysis))
    if notes:
        parts.append(
            html_details("how the figures were obtained", f"<ul>{notes}</ul>", opened=True)
        )
    return frame.html_page("muster profile", parts)


def _page_shares(analysis: Analysis) -> str:
    names = seen_shares(analysis)
    rows = [
        (
            f"rank {one.facts.rank}",
            one.facts.host,
            amount_text(one.shares.total_s, "s"),
            *(
                f"{amount_text(one.shares.by_name()[name], 's')} ({one.shares.part(name):.0%})"
                for name in names
            ),
        )
        for one in analysis.ranks[:_MOST_ROWS]
    ]
    return html_table(("", "machine", "step", *(WORDS[name] for name in names)), rows)


def _operations(one: RankAnalysis) -> str:
    if one.trace is None:
        return ""
    rows = (
        (amount_text(top.self_s, "s"), f"{top.calls:,.1f}", top.name)
        for top in one.trace.operations.top
    )
    return html_table(("self time per step", "calls", "operation"), rows)
