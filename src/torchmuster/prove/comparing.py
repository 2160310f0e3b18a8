"""Compare two runs from the start, or a resumed run with an undisturbed one. Pure functions of records.

Both comparisons walk the same steps on each rank, and stop at the first one that differs: later differences follow from it.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchmuster.prove.records import RankRecord, ResumeTrial, StepRecord, TrialRecord

# Relative difference of gradient norms that only the order of additions explains, in the first step.
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
GROWTH = 10.0  # of the rounding in later steps, whose weights differ already
_NO_ROUNDING = -1.0
_NEVER_ROUNDED = ("accumulation", "data-order", "loss-scale", "learning-rate")
_TORN = ("resume-failed", "ended-early", "weights")  # after a kill in a save
_RESULTS = ("computation", "rng")  # the same weights, data and state give another result
_LONGEST_ERROR = 120


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that differs although it should not; ``step`` counts from 1."""

    kind: str
    step: int
    what: str
    rank: int | None = None
    also: tuple[str, ...] = ()  # other kinds that differ in the same step
    line: str = ""  # of the script, as train.py:12
    keys: tuple[str, ...] = ()  # of the checkpoint


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The first difference of two runs, or in how many ``steps`` they are equal.

    ``rounding`` is the largest relative difference of norms in these steps.
    """

    difference: Difference | None = None
    why_not: str = ""  # they cannot be compared
    rounding: float = 0.0
    steps: int = 0


class Change(NamedTuple):
    """What differs in a step: the kind of the difference, and its text."""

    kind: str
    what: str


def rounding_limit(record: TrialRecord) -> float:
    """Return how far gradient norms may be apart in the first step, by the type of the weights."""
    parameters = record.ranks[0].parameters
    if parameters is None:
        return ROUNDING["float32"]
    return ROUNDING.get(parameters.dtype, ROUNDING["float32"])


# ---- two runs from the start


def compare_repeated(first: TrialRecord, second: TrialRecord) -> Comparison:
    """Find where two runs of the same script differ first; they must be bitwise equal."""
    compared = _compare_steps(first, second, 0, exact=True, tolerance=_NO_ROUNDING)
    if compared.difference is None and first.steps != second.steps:
        what = f"one run made {first.steps} steps, the other one {second.steps}"
        return Comparison(difference=Difference(kind="steps", step=compared.steps, what=what))
    return compared


# ---- a resumed run


def compare_resumed(baseline: TrialRecord, trial: ResumeTrial, *, exact: bool = True) -> Comparison:
    """Find the first thing in which a resumed run differs from the undisturbed one.

    DDP adds up gradients in another order in the first step of a process; with more than two ranks this changes the last
    digits, which is not a difference. Without ``exact``, the script does not even repeat itself bitwise: only data,
    learning rates and scale are compared.
    """
    resumed, expected = trial.resumed, trial.stopped.newest_step
    start = resumed_from(baseline, resumed, expected)
    problem = _start_problem(baseline, resumed, start, expected, exact=exact)
    if start is None:
        start = expected
    compared = Comparison()
    difference: Difference | None
    if problem is not None:
        kind = problem.kind
        if trial.stop.name == "save-killed" and kind in _TORN:
            kind = "torn-checkpoint"
        what = f"after a stop at step {trial.stop.after_step} ({trial.stop.name}), {problem.what}"
        difference = Difference(kind=kind, step=max(start, 1), what=what)
    else:
        tolerance = GROWTH * rounding_limit(baseline)
        compared = _compare_steps(baseline, resumed, start, exact=exact, tolerance=tolerance)
        difference = compared.difference
        if difference is not None:
            what = f"resumed from step {start}, step {difference.step}: {difference.what}"
            difference = replace(difference, what=what)
        elif start + resumed.steps < baseline.steps:
            difference = _early_end(baseline, resumed, start + resumed.steps)
    if difference is not None:
        for save in trial.stopped.saves:
            if save.step == expected:
                line = difference.line or save.line
                difference = replace(difference, line=line, keys=tuple(save.keys))
    return replace(compared, difference=difference)


def resumed_from(baseline: TrialRecord, resumed: TrialRecord, expected: int) -> int | None:
    """Return after which step of the undisturbed run a resumed one continues, by its weights."""
    if not resumed.steps:
        return None
    weights = resumed.ranks[0].steps[0].weights_before
    steps = baseline.ranks[0].steps
    known = [steps[0].weights_before, *(step.weights for step in steps)]
    equal = [number for number, candidate in enumerate(known) if candidate == weights]
    return min(equal, key=lambda number: abs(number - expected), default=None)


def _start_problem(
    baseline: TrialRecord,
    resumed: TrialRecord,
    start: int | None,
    expected: int,
    *,
    exact: bool,
) -> Change | None:
    """Return why a resumed run does not continue from its newest checkpoint."""
    if not resumed.steps:
        if resumed.trouble:
            return Change("resume-failed", f"the script does not resume: {_first_line(resumed)}")
        return Change("ended-early", "the script made no more steps, and exited without an error")
    if start is None and exact:
        return Change("weights", "the weights are not those of any step of the undisturbed run")
    if start is None or start >= expected:
        return None
    if start:
        what = f"the script resumed from step {start}; its newest checkpoint is of step {expected}"
        return Change("older-checkpoint", what)
    # It may have loaded the rest of the checkpoint: the optimizer state, or the learning rate.
    steps, first = baseline.ranks[0].steps, resumed.ranks[0].steps[0]
    rates = steps[min(expected, len(steps) - 1)].learning_rates
    has_rates = steps[0].learning_rates != rates == first.learning_rates
    if has_rates or (first.state_before and first.state_before == steps[expected - 1].state):
        what = "the weights are those of the start, but the rest of the checkpoint was loaded"
        return Change("weights", what)
    what = f"the script started from zero instead of step {expected}"
    return Change("started-from-zero", what)


def _early_end(baseline: TrialRecord, resumed: TrialRecord, last: int) -> Difference:
    if resumed.trouble:
        what = f"it failed after step {last}: {_first_line(resumed)}"
        return Difference(kind="resume-failed", step=last, what=what)
    what = f"the script exited after step {last} of {baseline.steps}"
    return Difference(kind="ended-early", step=last, what=what)


def _first_line(trial: TrialRecord) -> str:
    return textwrap.shorten(trial.trouble.splitlines()[0], _LONGEST_ERROR, placeholder=" …")


# ---- steps


def _compare_steps(
    baseline: TrialRecord, run: TrialRecord, start: int, *, exact: bool, tolerance: float
) -> Comparison:
    """Compare the steps of a run with those of ``baseline``, from step ``start`` (from 0) on."""
    rounding = 0.0  # once a step differs by rounding, all later ones do
    drawn = _generators_drawn_from(baseline, run)
    steps = min(run.steps, baseline.steps - start)
    for number in range(steps):
        differences = []
        for rank, other in zip(baseline.ranks, run.ranks, strict=True):
            before, after = rank.steps[start + number], other.steps[number]
            changes = _changes(before, after, drawn) + _copy_changes(rank, before, after, start)
            if number == 0:
                changes = _restored_otherwise(rank, after, start) + changes
                # Half a step was lost, which explains all the rest.
                changes.sort(key=lambda change: change.kind != "accumulation")
            if not exact:
                changes = _never_rounded(changes)
            elif changes and (rounding or changes[0].kind in _RESULTS):
                limit = tolerance
                if not rounding:
                    limit /= GROWTH
                apart = _apart(before, after)
                if apart <= limit:
                    rounding = max(rounding, apart)
                    changes = _never_rounded(changes)
            if changes:
                at = start + number + 1
                differences.append(_first_change(changes, at, rank, other, start))
        if differences:
            # A result may follow from the samples of another rank, whose gradients are added.
            first = min(differences, key=lambda difference: difference.kind in _RESULTS)
            return Comparison(difference=first)
    return Comparison(rounding=rounding, steps=steps)


def _first_change(
    changes: Sequence[Change], step: int, rank: RankRecord, other: RankRecord, start: int
) -> Difference:
    """Return the first change of a step, with the kinds of the other ones."""
    kind, what = changes[0]
    line = ""
    if kind == "data-order":
        line = rank.loader_line
        what = data_order(rank, other, start)
    also = dict.fromkeys(change.kind for change in changes if change.kind != kind)
    return Difference(kind=kind, step=step, what=what, rank=rank.rank, also=tuple(also), line=line)


def _never_rounded(changes: Sequence[Change]) -> list[Change]:
    return [change for change in changes if change.kind in _NEVER_ROUNDED]


def _changes(before: StepRecord, after: StepRecord, drawn: set[str]) -> list[Change]:
    """Return what differs between the same step of two runs, causes before effects."""
    expected, batches = before.micro_batches, after.micro_batches
    losses = [batch.loss for batch in expected]
    names = [name for name in sorted(drawn) if before.rng.get(name) != after.rng.get(name)]
    changes: list[Change] = []
    if before.buffers != after.buffers:
        changes.append(Change("buffers", "the buffers of the model differ"))
    if len(expected) != len(batches):
        what = f"the step has {len(batches)} micro-batches instead of {len(expected)}"
        changes.append(Change("accumulation", what))
    elif [batch.inputs for batch in expected] != [batch.inputs for batch in batches]:
        changes.append(Change("data-order", "the model gets other samples"))
    if before.scale != after.scale:
        what = f"the loss scale is {after.scale} instead of {before.scale}"
        changes.append(Change("loss-scale", what))
    if losses != [batch.loss for batch in batches] or before.gradients != after.gradients:
        if names:
            what = f"the random state of {', '.join(names)} differs, and so does the result"
            changes.append(Change("rng", what))
        else:
            what = "the same weights and samples give another result"
            changes.append(Change("computation", what))
    if before.learning_rates != after.learning_rates:
        what = f"the learning rate is {_rates(after)} instead of {_rates(before)}"
        changes.append(Change("learning-rate", what))
    if before.settings != after.settings:
        changes.append(Change("optimizer-state", "settings of the optimizer differ"))
    changes += _state_changes(before.state, after.state)
    if before.weights != after.weights:
        changes.append(Change("weights", "the weights after the step differ"))
    return changes


def _generators_drawn_from(*trials: TrialRecord) -> set[str]:
    """Return the random generators from which steps draw: those whose state changes."""
    names: set[str] = set()
    for trial in trials:
        for rank in trial.ranks:
            for step, following in zip(rank.steps, rank.steps[1:], strict=False):
                changed = step.rng.items() - following.rng.items()
                names.update(name for name, _ in changed)
    return names


def _rates(step: StepRecord) -> str:
    return ", ".join(f"{rate:.6g}" for rate in step.learning_rates)


def _state_changes(expected: dict[str, str], state: dict[str, str]) -> list[Change]:
    if expected == state:
        return []
    different = [name for name in expected if expected[name] != state.get(name)]
    what = f"the optimizer state differs: {', '.join(different or state)}"
    return [Change("optimizer-state", what)]


def _restored_otherwise(rank: RankRecord, step: StepRecord, start: int) -> list[Change]:
    """Return what differs before the first step of another process."""
    weights, state = rank.steps[0].weights_before, rank.steps[0].state_before
    if start:
        weights, state = rank.steps[start - 1].weights, rank.steps[start - 1].state
    changes: list[Change] = []
    if step.weights_before != weights:
        changes.append(Change("weights", "the weights before the step differ"))
    return changes + _state_changes(state or {}, step.state_before or {})


def _copy_changes(
    rank: RankRecord, before: StepRecord, after: StepRecord, start: int
) -> list[Change]:
    """Return a change if a copy of the weights that changes, such as their average, is another one."""
    old: set[str] = set()
    if start:
        old.update(rank.steps[start - 1].copies)
    changing = set(before.copies) - old
    if not old or changing <= set(after.copies):
        return []
    what = "a second copy of the weights, such as an average (EMA), differs"
    return [Change("weight-copy", what)]


def _apart(before: StepRecord, after: StepRecord) -> float:
    """Return the largest relative difference of losses and norms of a step."""
    pairs = [
        (before.weights_norm, after.weights_norm),
        (before.squared_gradients, after.squared_gradients),
    ]
    for expected, batch in zip(before.micro_batches, after.micro_batches, strict=False):
        if expected.loss is not None and batch.loss is not None:
            pairs.append((expected.loss, batch.loss))
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def data_order(baseline: RankRecord, run: RankRecord, start: int) -> str:
    """Describe in which way the samples of a run differ that continues after ``start`` steps."""
    inputs = [batch.inputs for batch in baseline.micro_batches()]
    used = sum(len(step.micro_batches) for step in baseline.steps[:start])
    before, after = inputs[:used], inputs[used:]
    first = run.micro_batches()[0].inputs
    if first in before:
        again = before[::-1].index(first) + 1
        return f"data starts again: the last {again} batches are repeated on this rank"
    if first in after[1:]:
        return f"data is lost: the next {after.index(first)} batches are skipped on this rank"
    return "the samples come in another order, or are changed in another way (random augmentation)"
