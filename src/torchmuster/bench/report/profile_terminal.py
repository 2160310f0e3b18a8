"""A profile on one screen: how long a step takes, where it goes on each rank, and what to mend first."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchmuster.bench.profile.advice import Advice, nothing_to_mend
from torchmuster.bench.profile.analysis import Analysis, RankAnalysis
from torchmuster.bench.profile.changes import Trial
from torchmuster.bench.profile.shares import WORDS
from torchmuster.diagnose.report.terminal import columns
from torchmuster.finding import render
from torchmuster.pages.figures import amount
from torchmuster.redaction import harmless
from torchmuster.units import plural

_MOST_RANKS = 6
_MOST_OPERATIONS = 4
_WHOLE_ADVICE = 2
_SEEN_FROM = 0.005
_LONGEST_NAME = 60


def screen(
    analysis: Analysis,
    advice: Sequence[Advice],
    proof: Trial | None,
    folder: Path,
    *,
    width: int = 100,
    colour: bool = False,
) -> str:
    """Return what a terminal shows; the page has all ranks, all operations and the pictures."""
    blocks = [
        [*_wrapped(question(analysis), width)],
        [*_shares(analysis)],
        [*_remarks(analysis, width)],
        [*_advice(analysis, advice, width, colour)],
    ]
    if proof is not None:
        blocks.append([*_wrapped(proved(advice, proof), width)])
    blocks.append([f"page and traces (ui.perfetto.dev opens them): {folder}"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def question(analysis: Analysis) -> str:
    """Say in a sentence what was looked at."""
    first, ranks = analysis.facts[0], len(analysis.facts)
    where = "the CPU" if first.device == "cpu" else first.device_name
    words = (
        f"{plural(len(analysis.steps), 'step')} of {plural(ranks, 'rank')} on {where}: "
        f"a step takes {amount(analysis.step_s, 's')}"
    )
    samples = first.loader.samples_per_batch if first.loader is not None else None
    if samples and analysis.step_s:
        each = max(one.micro_batches for step in analysis.steps for one in step.values()) or 1
        words += f", {amount(samples * each * ranks / analysis.step_s, 'samples/s')}"
    if first.flops_per_step and analysis.step_s:
        words += f", {amount(first.flops_per_step / analysis.step_s, 'FLOP/s')} a rank"
    return words


def proved(advice: Sequence[Advice], proof: Trial) -> str:
    """Say what was predicted of a change and what was measured with it."""
    predicted = next((one.gain for one in advice if one.change == proof.change), None)
    words = "" if predicted is None else f"predicted {predicted:.2f}x, "
    return (
        f"applied: {proof.change}: {words}measured {proof.gain:.2f}x "
        f"(from {proof.low:.2f}x to {proof.high:.2f}x in {plural(len(proof.after_s), 'run')})"
    )


def seen_shares(analysis: Analysis) -> list[str]:
    """Return the names of the shares that any rank has something of."""
    return [
        name for name in WORDS if any(one.shares.part(name) >= _SEEN_FROM for one in analysis.ranks)
    ]


def remarks(analysis: Analysis) -> Iterator[str]:
    """Give sentences about how the figures came about, and what is missing in them."""
    factor = analysis.profiler_factor
    if factor is not None:
        on_device = any(one.trace is not None and one.trace.on_device for one in analysis.ranks)
        which = "with" if on_device else "without"
        cost = f"makes a step {factor:.2f}x as long" if factor > 1.05 else "made no step longer"
        yield f"the shares are of steps {which} the profiler, which {cost}"
    for one in analysis.ranks:
        yield from _of_trace(one)
        yield from (f"rank {one.facts.rank}: {text}" for text in one.facts.trouble)


def _of_trace(one: RankAnalysis) -> Iterator[str]:
    rank, trace, kept = one.facts.rank, one.trace, one.facts.trace
    if kept is not None and kept.why_cut:
        yield f"rank {rank}: its trace was cut: {kept.why_cut}"
    if one.no_trace:
        yield f"rank {rank}: its trace could not be looked at: {one.no_trace.splitlines()[0]}"
    if trace is None:
        return
    if trace.left_out:
        yield (
            f"rank {rank}: its trace is large; {len(trace.steps)} of its "
            f"{len(trace.steps) + len(trace.left_out)} steps were looked at"
        )
    if trace.shortened:
        yield f"rank {rank}: its step is very large; only its beginning was looked at"
    if trace.truncated:
        yield f"rank {rank}: its trace ends too early; what is there was looked at"
    if trace.unreadable:
        yield f"rank {rank}: {plural(trace.unreadable, 'event')} of its trace could not be read"


def _shares(analysis: Analysis) -> Iterator[str]:
    names = seen_shares(analysis)
    shown = _shown(analysis)
    head = ["of a step", *(f"rank {one.facts.rank}" for one in shown)]
    rows = [
        [WORDS[name], *(f"{one.shares.part(name):.0%}" for one in shown)]
        for name in sorted(names, key=lambda name: -max(one.shares.part(name) for one in shown))
    ]
    yield from columns([head, *rows], right=True)
    if len(analysis.ranks) > len(shown):
        yield f"and {len(analysis.ranks) - len(shown)} more ranks, which the page has"


def _shown(analysis: Analysis) -> list[RankAnalysis]:
    """Return the first ranks, and the one that the others wait for."""
    slow = None if analysis.slow is None else analysis.slow.rank
    first = list(analysis.ranks[:_MOST_RANKS])
    if slow is not None and slow not in {one.facts.rank for one in first}:
        first[-1] = next(one for one in analysis.ranks if one.facts.rank == slow)
    return first


def _remarks(analysis: Analysis, width: int) -> Iterator[str]:
    traced = next((one for one in analysis.ranks if one.trace is not None), None)
    if traced is not None and traced.trace is not None and traced.trace.operations.top:
        made_of = "; ".join(
            f"{shortened(one.name)} {amount(one.self_s, 's')} in {one.calls:,.0f}"
            for one in traced.trace.operations.top[:_MOST_OPERATIONS]
        )
        yield from _wrapped(f"operations of rank {traced.facts.rank}: {made_of}", width)
        small = traced.trace.operations.smallness
        if small is not None:
            yield from _wrapped(smallness_in_words(traced), width)
    for sentence in remarks(analysis):
        yield from _wrapped(sentence, width)


def smallness_in_words(one: RankAnalysis) -> str:
    """Say whether a step is limited by starting operations."""
    small = None if one.trace is None else one.trace.operations.smallness
    if small is None:
        return ""
    verdict = "launch-bound" if small.bound else "not launch-bound"
    return (
        f"{verdict}: {small.calls:,.0f} operations a step, the median takes {amount(small.median_s, 's')}; those of less "
        f"than 20 µs have {small.small_part:.0%} of their time"
    )


def shortened(name: str) -> str:
    """Cut a kernel's name, which can be a page long."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _advice(
    analysis: Analysis, advice: Sequence[Advice], width: int, colour: bool
) -> Iterator[str]:
    if not advice:
        yield render([nothing_to_mend(analysis)], width=width, colour=colour)
    for one in advice[:_WHOLE_ADVICE]:
        yield render([one.finding], width=width, colour=colour)
    for one in advice[_WHOLE_ADVICE:]:
        yield from _wrapped(f"also     {one.finding.what}", width)


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(harmless(sentence), width, break_long_words=False, break_on_hyphens=False)
