"""Pictures of a profile: each rank's step as a bar of its shares, one step over time, memory over time."""

from collections.abc import Sequence
from html import escape

from torchmuster.bench.profile.analysis import Analysis, RankAnalysis
from torchmuster.bench.profile.shares import WORDS
from torchmuster.bench.profile.step_picture import Piece
from torchmuster.pages.charts import Axis, Curve, Stack, lines, stacked, svg
from torchmuster.pages.figures import amount

_MOST_BARS = 64
_MOST_TIMELINES = 16
_MOST_CURVES = 6
_LEFT, _WIDTH, _TOP, _ROW = 70, 860, 40, 40


def shares_picture(analysis: Analysis) -> str:
    """Draw the step of each rank as a bar that is made of its shares."""
    shown = analysis.ranks[:_MOST_BARS]
    stacks = [
        Stack(
            name=f"rank {one.facts.rank}",
            parts={WORDS[name]: one.shares.by_name()[name] for name in _names(analysis)},
        )
        for one in shown
    ]
    return stacked("where a step goes", "s", stacks)


def memory_picture(analysis: Analysis) -> str | None:
    """Draw memory over time, if the profiler was told to record it."""
    found = [(one, one.trace.memory) for one in analysis.ranks if one.trace and one.trace.memory]
    if not found:
        return None
    on_device = found[0][0].trace is not None and found[0][0].trace.on_device
    title = "memory that was given out" if on_device else "memory since the profiler began"
    curves = [
        Curve(name=f"rank {one.facts.rank}", points=points) for one, points in found[:_MOST_CURVES]
    ]
    return lines(title, Axis(title="seconds", unit="s"), Axis(title="bytes", unit="B"), curves)


def step_picture(analysis: Analysis) -> str | None:
    """Draw one step of each rank over time: what it did, and below it what was on its way."""
    shown = [one for one in analysis.ranks if one.trace and one.trace.picture][:_MOST_TIMELINES]
    if not shown:
        return None
    longest_s = max(_took_s(one) for one in shown)
    body: list[str] = []
    names = _names(analysis)
    for place, one in enumerate(shown):
        picture = one.trace.picture if one.trace else None
        if picture is None:
            continue
        y = _TOP + place * _ROW
        body.append(_text(_LEFT - 8, y + 15, f"rank {one.facts.rank}", "end"))
        body += _row(picture.doing, names, y, 20, longest_s)
        body += _row(picture.sending, names, y + 23, 6, longest_s)
    bottom = _TOP + len(shown) * _ROW
    for part in range(5):
        at_s = longest_s * part / 4
        body.append(_text(_across(at_s, longest_s), bottom + 12, amount(at_s, "s"), "middle"))
    body.append(_text(14, bottom + 34, "colours as above; the thin rows: messages on their way"))
    return svg("one step over time", _WIDTH, bottom + 48, body)


def _names(analysis: Analysis) -> list[str]:
    """Return the shares that any picture shows, in the order of their colours."""
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


def _row(
    pieces: Sequence[Piece], names: Sequence[str], y: float, height: float, longest_s: float
) -> list[str]:
    found = []
    for one in pieces:
        begin, end = _across(one.begin_s, longest_s), _across(one.end_s, longest_s)
        colour = f"var(--c{names.index(one.name)})" if one.name in names else "var(--ink)"
        tip = f"{WORDS.get(one.name, one.name)}: {amount(one.end_s - one.begin_s, 's')}"
        found.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 0.5):.1f}" height="{height}" '
            f'style="fill:{colour}"><title>{escape(tip)}</title></rect>'
        )
    return found


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
