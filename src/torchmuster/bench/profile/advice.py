"""Advice on how to make training faster, best first, with expected gain and its source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.profile.analysis import Analysis
from torchmuster.bench.profile.causes import (
    Cause,
    Look,
    full_precision,
    host_reads,
    many_saves,
    no_overlap,
    sent_each_micro_batch,
    starved_loader,
    straggler,
    tiny_batch,
    too_many_threads,
)
from torchmuster.bench.profile.changes import ChangeTrial, TriedChange
from torchmuster.bench.profile.shares import WORDS
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import amount_text

# A change that affects the results needs a larger gain than one that does not.
_WEIGHT_OF_ANOTHER_TRAINING = 0.4
_CAUSES: tuple[Look, ...] = (
    starved_loader,
    host_reads,
    many_saves,
    straggler,
    no_overlap,
    sent_each_micro_batch,
    too_many_threads,
    full_precision,
    tiny_batch,
)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to fix. ``gain`` is the expected factor in samples/s; None: unknown."""

    cause: str
    gain: float | None
    known_by: Literal["trace", "trial"]
    finding: Finding
    change: TriedChange | None  # what --verify can apply; None: only manually


def advise(analysis: Analysis, trials: Sequence[ChangeTrial] = ()) -> tuple[Advice, ...]:
    """Return the advice, best first; empty if nothing gains enough."""
    if not analysis.steps:
        return ()
    found = [one for look in _CAUSES if (one := look(analysis, trials)) is not None]
    return tuple(_advice(one) for one in sorted(found, key=_worth, reverse=True))


def _worth(cause: Cause) -> float:
    if cause.gain is None:
        return 0.0
    return (cause.gain - 1) * (_WEIGHT_OF_ANOTHER_TRAINING if cause.another_training else 1.0)


def _advice(cause: Cause) -> Advice:
    would = "gain unknown until tried"
    if cause.gain is not None:
        would = f"{cause.would} {cause.gain:.1f}x"
    known = (
        "measured on this training" if cause.known_by == "trial" else "computed from the step times"
    )
    return Advice(
        cause=cause.name,
        gain=cause.gain,
        known_by=cause.known_by,
        finding=Finding(
            name=cause.name,
            status=Status.WARNING if cause.gain is not None else Status.NOTE,
            what=f"{cause.what}: {would}",
            why=cause.why,
            fix=cause.fix,
            evidence=f"{cause.evidence}\ngain {known}"
            if cause.gain is not None
            else cause.evidence,
        ),
        change=cause.change,
    )


def nothing_to_fix(analysis: Analysis, trials: Sequence[ChangeTrial] = ()) -> Finding:
    """Return what limits a training run for which there is no advice."""
    limiting = advice_limit(analysis)
    tried = "".join(f"\ntried: {one.change}: {one.gain:.2f}x" for one in trials)
    return Finding(
        name="nothing-to-fix",
        status=Status.OK,
        what=f"nothing to fix: {limiting}",
        why="no part of the step is both large and avoidable",
        evidence=f"a step takes {amount_text(analysis.step_s, 's')}{tried}",
    )


def advice_limit(analysis: Analysis) -> str:
    """Return the largest share of the step over all ranks, and its most expensive operation."""
    names = dict.fromkeys(WORDS, 0.0)
    for rank in analysis.ranks:
        for name in names:
            names[name] += rank.shares.part(name) / len(analysis.ranks)
    names["compute"] += names.pop("overlapped")
    most = max(names, key=lambda name: names[name])
    words = f"{names[most]:.0%} of the step is {WORDS[most]}"
    traced = next((one.trace for one in analysis.ranks if one.trace is not None), None)
    if most == "compute" and traced is not None and traced.operations.top:
        words += f", most of it {traced.operations.top[0].name}"
    return words
