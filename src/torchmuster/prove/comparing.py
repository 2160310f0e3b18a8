"""Compare two runs from the start, or a resumed run with an undisturbed one. Pure functions of records."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchmuster.prove.records import MicroBatch, RankRecord, StepRecord, TrialRecord

if TYPE_CHECKING:
    from torchmuster.prove.trials import ResumeTrial

# Relative difference of gradient norms that only the order of additions explains, in the first step.
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
GROWTH = 10.0  # of the rounding in later steps, whose weights differ already
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
    """What two runs have in common: nothing if ``difference`` or ``why_not`` is set.

    ``apart`` is the largest relative difference of norms in the compared ``steps``, by rounding.
    """

    difference: Difference | None = None
    why_not: str = ""  # they cannot be compared
    apart: float = 0.0
    steps: int = 0


Change = tuple[str, str]  # the kind of a difference, and its text


def _difference(changes: Sequence[Change], step: int, rank: RankRecord) -> Difference:
    """Return the first change of a step."""
    kind, what = changes[0]
    line = ""
    if kind == "data-order":
        line = rank.loader_line
    later = dict.fromkeys(other for other, _ in changes if other != kind)
    return Difference(kind=kind, step=step, what=what, rank=rank.rank, also=tuple(later), line=line)


# ---- two runs from the start


def compare_repeated(first: TrialRecord, second: TrialRecord) -> Comparison:
    """Find where two runs of the same script differ first."""
    drawn = _generators_drawn_from(first, second)
    steps = min(first.steps, second.steps)
    for index in range(steps):
        for rank, repeated in zip(first.ranks, second.ranks, strict=True):
            changes = _changes(rank.steps[index], repeated.steps[index], drawn)
            if index == 0:
                changes = _restored_otherwise(rank, repeated.steps[0], 0) + changes
            if changes:
                return Comparison(difference=_difference(changes, index + 1, rank))
    if first.steps != second.steps:
        what = f"one run made {first.steps} steps, the other one {second.steps}"
        return Comparison(difference=Difference(kind="steps", step=steps, what=what))
    return Comparison(steps=steps)


def _changes(before: StepRecord, after: StepRecord, drawn: set[str]) -> list[Change]:
    """Return what differs between the same step of two runs, causes before effects."""
    expected, batches = before.micro_batches, after.micro_batches
    losses = [batch.loss for batch in expected]
    names = [name for name in sorted(drawn) if before.rng.get(name) != after.rng.get(name)]
    changes: list[Change] = []
    if before.buffers != after.buffers:
        changes.append(("buffers", "the buffers of the model differ"))
    if len(expected) != len(batches):
        what = f"the step has {len(batches)} micro-batches instead of {len(expected)}"
        changes.append(("accumulation", what))
    elif [batch.inputs for batch in expected] != [batch.inputs for batch in batches]:
        changes.append(("data-order", "the model gets other samples"))
    if before.scale != after.scale:
        what = f"the loss scale is {after.scale} instead of {before.scale}"
        changes.append(("loss-scale", what))
    if losses != [batch.loss for batch in batches] or before.gradients != after.gradients:
        if names:
            what = f"the random state of {', '.join(names)} differs, and so does the result"
            changes.append(("rng", what))
        else:
            what = "the same weights and samples give another result"
            changes.append(("computation", what))
    if before.learning_rates != after.learning_rates:
        what = f"the learning rate is {_rates(after)} instead of {_rates(before)}"
        changes.append(("learning-rate", what))
    if before.settings != after.settings:
        changes.append(("optimizer-state", "settings of the optimizer differ"))
    changes += _state_changes(before.state, after.state)
    if before.weights != after.weights:
        changes.append(("weights", "the weights after the step differ"))
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
    return [("optimizer-state", f"the optimizer state differs: {', '.join(different or state)}")]


# ---- a resumed run


def compare_resumed(
    baseline: TrialRecord, trial: "ResumeTrial", *, exact: bool = True
) -> Comparison:
    """Find the first thing in which a resumed run differs from the undisturbed one.

    DDP adds up gradients in another order in the first step of a process; with more than two ranks this changes the last
    digits, which is not a difference. Without ``exact``, the script does not even repeat itself bitwise: only data, learning rates and scale are compared.
    """
    resumed, expected = trial.resumed, trial.newest_step
    continued = resumed_from(baseline, resumed, expected)
    start = continued if continued is not None else expected
    compared = Comparison()
    problem = _start_problem(baseline, resumed, continued, expected, exact=exact)
    if problem is not None:
        kind, what = problem
        if trial.stop.name == "save-killed" and kind in _TORN:
            kind = "torn-checkpoint"
        what = f"after a stop at step {trial.stop.after_step} ({trial.stop.name}), {what}"
        difference: Difference | None = Difference(kind=kind, step=max(start, 1), what=what)
    else:
        compared = _compare_steps(baseline, resumed, start, exact=exact)
        difference = compared.difference
        last = start + resumed.steps
        if difference is None and last < baseline.steps:
            kind, what = "ended-early", f"the script exited after step {last} of {baseline.steps}"
            if resumed.trouble:
                kind, what = (
                    "resume-failed",
                    f"it failed after step {last}: {_first_line(resumed)}",
                )
            difference = Difference(kind=kind, step=last, what=what)
    for save in trial.stopped.saves:
        if difference is not None and save.step == expected:
            line = difference.line or save.line
            difference = replace(difference, line=line, keys=tuple(save.keys))
    return replace(compared, difference=difference)


def _compare_steps(
    baseline: TrialRecord, resumed: TrialRecord, start: int, *, exact: bool
) -> Comparison:
    """Compare the steps of a resumed run with those of the undisturbed one, from ``start`` on."""
    rounding = 0.0
    tolerance = ROUNDING.get(baseline.dtype, ROUNDING["float32"])
    drawn = _generators_drawn_from(baseline, resumed)
    for number in range(min(resumed.steps, baseline.steps - start)):
        differences = []
        for rank, continued in zip(baseline.ranks, resumed.ranks, strict=True):
            before, step = rank.steps[start + number], continued.steps[number]
            changes = _changes(before, step, drawn) + _copy_changes(rank, before, step, start)
            if number == 0:
                if exact:
                    changes = _restored_otherwise(rank, step, start) + changes
                # Half a step was lost, which explains all the rest.
                changes.sort(key=lambda change: change[0] != "accumulation")
            if exact and changes and (rounding or changes[0][0] in _RESULTS):
                apart = _apart(before, step)
                is_rounding = apart <= (tolerance if rounding else tolerance / GROWTH)
                if is_rounding:
                    rounding = max(rounding, apart)
            else:
                is_rounding = not exact
            if is_rounding:
                changes = [change for change in changes if change[0] in _NEVER_ROUNDED]
            if changes:
                kind, what = changes[0]
                if kind == "data-order":
                    what = data_order(rank, continued, start)
                at = start + number + 1
                changes[0] = (kind, f"resumed from step {start}, step {at}: {what}")
                differences.append(_difference(changes, at, rank))
        if differences:
            # A result may follow from the samples of another rank, whose gradients are added.
            first = min(differences, key=lambda difference: difference.kind in _RESULTS)
            return Comparison(difference=first)
    return Comparison(apart=rounding, steps=resumed.steps)


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
            return "resume-failed", f"the script does not resume: {_first_line(resumed)}"
        return "ended-early", "the script made no more steps, and exited without an error"
    if start is None and exact:
        return "weights", "the weights are not those of any step of the undisturbed run"
    if start is None or start >= expected:
        return None
    if start:
        what = f"the script resumed from step {start}; its newest checkpoint is of step {expected}"
        return "older-checkpoint", what
    # It may have loaded the rest of the checkpoint: the optimizer state, or the learning rate.
    steps, first = baseline.ranks[0].steps, resumed.ranks[0].steps[0]
    rates = steps[min(expected, len(steps) - 1)].learning_rates
    has_rates = steps[0].learning_rates != rates == first.learning_rates
    if has_rates or (first.state_before and first.state_before == steps[expected - 1].state):
        what = "the weights are those of the start, but the rest of the checkpoint was loaded"
        return "weights", what
    return "started-from-zero", f"the script started from zero instead of step {expected}"


def _first_line(trial: TrialRecord) -> str:
    return textwrap.shorten(trial.trouble.splitlines()[0], _LONGEST_ERROR, placeholder=" …")


def resumed_from(baseline: TrialRecord, resumed: TrialRecord, expected: int) -> int | None:
    """Return after which step of the undisturbed run a resumed one continues, by its weights."""
    if not resumed.steps:
        return None
    weights = resumed.ranks[0].steps[0].weights_before
    steps = baseline.ranks[0].steps
    known = [steps[0].weights_before, *(step.weights for step in steps)]
    equal = [number for number, candidate in enumerate(known) if candidate == weights]
    return min(equal, key=lambda number: abs(number - expected), default=None)


def _restored_otherwise(rank: RankRecord, step: StepRecord, start: int) -> list[Change]:
    """Return what differs before the first step of another process."""
    weights, state = rank.steps[0].weights_before, rank.steps[0].state_before
    if start:
        weights, state = rank.steps[start - 1].weights, rank.steps[start - 1].state
    changes: list[Change] = []
    if step.weights_before != weights:
        changes.append(("weights", "the weights before the step differ"))
    return changes + _state_changes(state or {}, step.state_before or {})


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


def _copy_changes(
    rank: RankRecord, before: StepRecord, after: StepRecord, start: int
) -> list[Change]:
    """Return a change if a copy of the weights that changes, such as their average, is another one."""
    old = set(rank.steps[start - 1].copies) if start else set()
    changing = set(before.copies) - old
    if old and not changing <= set(after.copies):
        return [("weight-copy", "a second copy of the weights, such as an average (EMA), differs")]
    return []


def data_order(baseline: RankRecord, resumed: RankRecord, start: int) -> str:
    """Describe in which way the samples of a resumed run differ."""
    batches = baseline.micro_batches()
    used = sum(len(step.micro_batches) for step in baseline.steps[:start])
    before, after = batches[:used], batches[used:]
    read = resumed.micro_batches()
    inputs = [batch.inputs for batch in batches]
    first = read[0].inputs
    if first in inputs[:used]:
        index = used - 1 - inputs[:used][::-1].index(first)
        repeated = before[index:]
        place, again = repeated[0].place, ""
        if place is not None and place[2] <= 1:  # libraries read one batch ahead
            again = " from the beginning of the epoch"
        return f"data starts again{again}: {_count(repeated)} are repeated on this rank"
    if first in inputs[used:]:
        skipped = after[: inputs[used:].index(first)]
        return f"{_count(skipped)} are skipped on this rank"
    return "the samples come in another order, or are changed in another way (random augmentation)"


def _count(batches: Sequence[MicroBatch]) -> str:
    samples = sum(len(batch.samples) for batch in batches)
    return f"{len(batches)} batches ({samples} samples)"
