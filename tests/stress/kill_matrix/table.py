"""Write the results of a kill matrix as benchmarks/results/kill-matrix.md."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stress.kill_matrix.events import LAYOUTS, MOMENTS, VICTIMS, Plan


@dataclass(frozen=True, kw_only=True)
class Result:
    """One killed run: ``problem`` is "" if it was equal to the undisturbed run, else what was wrong."""

    plan: Plan
    problem: str


def render(results: Sequence[Result], *, seed: int, took_s: float) -> str:
    """Return the page as Markdown."""
    kills = [(result, kill) for result in results for kill in result.plan.kills]
    failed = sum(bool(result.problem) for result in results)
    verdict = (
        "all runs finished, with results bit-identical to the undisturbed run"
        if not failed
        else f"{failed} of the runs failed"
    )
    lines = [
        "# Kill matrix: SIGKILL of every process at every moment",
        "",
        "Written by `python -m stress.kill_matrix`. [Kill matrix](../../docs/tested.md#kill-matrix) describes the moments and the method.",
        "",
        f"{len(kills)} kills in {len(results)} runs (seed {seed}, {took_s / 60:.0f} minutes on "
        f"{os.cpu_count()} cores): {verdict}.",
        "",
        *_table(
            ("killed", *MOMENTS),
            (
                (
                    victim,
                    *(
                        sum((kill.victim, kill.moment) == (victim, moment) for _, kill in kills)
                        for moment in MOMENTS
                    ),
                )
                for victim in VICTIMS
            ),
        ),
        "",
        *_table(("trained with", "runs", "kills", "bit-identical runs"), _by_layout(results)),
    ]
    return "\n".join(lines) + "\n"


def _by_layout(results: Sequence[Result]) -> Iterable[tuple[object, ...]]:
    for layout in LAYOUTS:
        of_it = [result for result in results if result.plan.layout == layout]
        kills = sum(len(result.plan.kills) for result in of_it)
        equal = Counter(not result.problem for result in of_it)[True]
        yield str(layout), len(of_it), kills, equal


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    yield _row(head)
    yield _row(["---"] * len(head))
    for row in rows:
        yield _row(row)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
