"""A profile as one page that needs no other file and no network."""

from collections.abc import Sequence
from html import escape

from torchmuster.bench.profile.advice import Advice, nothing_to_mend
from torchmuster.bench.profile.analysis import Analysis, RankAnalysis
from torchmuster.bench.profile.changes import Trial
from torchmuster.bench.profile.shares import WORDS
from torchmuster.bench.report.profile_pictures import memory_picture, shares_picture, step_picture
from torchmuster.bench.report.profile_terminal import (
    proved,
    question,
    remarks,
    seen_shares,
    smallness_in_words,
)
from torchmuster.pages import frame
from torchmuster.pages.figures import amount
from torchmuster.pages.frame import article, folded, table

_MOST_ROWS = 1000


def page(analysis: Analysis, advice: Sequence[Advice], proof: Trial | None) -> str:
    """Return the page. Everything that came from the training is shown as text, never as markup."""
    told = [one.finding for one in advice] or [nothing_to_mend(analysis)]
    known = sum(one.gain is not None for one in advice)
    verdict = '<b class="ok">nothing to mend</b>'
    if known:
        verdict = f'<b class="warning">{known} to mend</b>'
    elif advice:
        verdict = f'<b class="note">{len(advice)} to try</b>'
    parts = [f"<h1>muster profile: {verdict}</h1>", f"<p>{escape(question(analysis))}</p>"]
    if proof is not None:
        parts.append(f"<p>{escape(proved(advice, proof))}</p>")
    parts += [article(one) for one in told]
    pictures = (shares_picture(analysis), step_picture(analysis), memory_picture(analysis))
    parts += [f"<figure>{one}</figure>" for one in pictures if one]
    parts.append(folded("where a step goes, by rank", _shares(analysis), opened=True))
    for one in analysis.ranks:
        if one.trace is not None and one.trace.operations.top:
            body = f"<p>{escape(smallness_in_words(one))}</p>{_operations(one)}"
            title = f"operations of rank {one.facts.rank}"
            parts.append(folded(title, body, opened=one is analysis.ranks[0]))
    notes = "".join(f"<li>{escape(one)}</li>" for one in remarks(analysis))
    if notes:
        parts.append(folded("how the figures came about", f"<ul>{notes}</ul>", opened=True))
    return frame.page("muster profile", parts)


def _shares(analysis: Analysis) -> str:
    names = seen_shares(analysis)
    rows = [
        (
            f"rank {one.facts.rank}",
            one.facts.host,
            amount(one.shares.total_s, "s"),
            *(
                f"{amount(one.shares.by_name()[name], 's')} ({one.shares.part(name):.0%})"
                for name in names
            ),
        )
        for one in analysis.ranks[:_MOST_ROWS]
    ]
    return table(("", "machine", "step", *(WORDS[name] for name in names)), rows)


def _operations(one: RankAnalysis) -> str:
    if one.trace is None:
        return ""
    rows = (
        (amount(top.self_s, "s"), f"{top.calls:,.1f}", top.name) for top in one.trace.operations.top
    )
    return table(("its own time in a step", "calls", "operation"), rows)
