"""Compare two runs from the start, or a resumed run with an undisturbed one. Pure functions of records."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from torchmuster.prove.records import EventRecord, MicroBatch, RankRecord, StepRecord, TrialRecord

if TYPE_CHECKING:
    from torchmuster.prove.trials import ResumeTrial

Property = Literal["determinism", "resume", "ranks"]

# Relative difference of gradient norms that only the order of additions explains, in the first step.
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
GROWTH = 10.0  # of the rounding in later steps, whose weights differ already
_NEVER_ROUNDED = ("accumulation", "data-order", "loss-scale", "learning-rate")
_RESULTS = ("computation", "rng")  # the same weights, data and state give another result
_LONGEST_ERROR = 120


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that differs although it should not; ``step`` counts from 1, 0 is before the first step."""

    property: Property
    kind: str
    step: int
    what: str
    rank: int | None = None
    also: tuple[str, ...] = ()  # other kinds that differ in the same step
    line: str = ""  # of the script, as train.py:12
    keys: tuple[str, ...] = ()  # of the checkpoint


class Change(NamedTuple):
    """What differs in a step: the kind of a difference, and its text."""

    kind: str
    what: str


# ---- two runs from the start


def compare_repeated(first: TrialRecord, second: TrialRecord) -> Difference | None:
    """Return where two runs of the same script differ first."""
    drawn = _generators_drawn_from(first, second)
    for index in range(min(first.steps, second.steps)):
        for rank, repeated in zip(first.ranks, second.ranks, strict=True):
            before, after = rank.steps[index], repeated.steps[index]
            changes = list(_changes(before, after, drawn))
            step = index + 1
            if index == 0 and before.weights_before != after.weights_before:
                step = 0
                what = "the weights before the first step differ"
                changes.insert(0, Change("weights", what))
            if changes:
                line = ""
                if changes[0].kind == "data-order":
                    line = rank.line_of("loader")
                return Difference(
                    property="determinism",
                    kind=changes[0].kind,
                    step=step,
                    rank=rank.rank,
                    what=changes[0].what,
                    also=tuple(change.kind for change in changes[1:]),
                    line=line,
                )
    if first.steps != second.steps:
        return Difference(
            property="determinism",
            kind="steps",
            step=min(first.steps, second.steps),
            what=f"one run made {first.steps} steps, the other one {second.steps}",
        )
    return None


def _changes(before: StepRecord, after: StepRecord, drawn: set[str]) -> Iterator[Change]:
    """Yield what differs between the same step of two runs, causes before effects."""
    if before.buffers != after.buffers:
        yield Change("buffers", "the buffers of the model differ")
    expected, batches = before.micro_batches, after.micro_batches
    if len(expected) != len(batches):
        what = f"the step has {len(batches)} micro-batches instead of {len(expected)}"
        yield Change("accumulation", what)
    elif [batch.inputs for batch in expected] != [batch.inputs for batch in batches]:
        yield Change("data-order", "the model gets other samples")
    if before.scale != after.scale:
        what = f"the loss scale is {after.scale} instead of {before.scale}"
        yield Change("loss-scale", what)
    losses = [batch.loss for batch in expected]
    if losses != [batch.loss for batch in batches] or before.gradients != after.gradients:
        names = [name for name in sorted(drawn) if before.rng.get(name) != after.rng.get(name)]
        if names:
            what = f"the random state of {', '.join(names)} differs, and so does the result"
            yield Change("rng", what)
        else:
            yield Change("computation", "the same weights and samples give another result")
    if before.learning_rates != after.learning_rates:
        yield Change("learning-rate", _rates_text(before, after))
    if before.settings != after.settings:
        yield Change("optimizer-state", "settings of the optimizer differ")
    if before.state != after.state:
        yield Change("optimizer-state", _state_text(before.state, after.state))
    if before.weights != after.weights:
        yield Change("weights", "the weights after the step differ")


def _generators_drawn_from(*trials: TrialRecord) -> set[str]:
    """Return the random generators from which steps draw: those whose state changes."""
    names: set[str] = set()
    for trial in trials:
        for rank in trial.ranks:
            for step, following in zip(rank.steps, rank.steps[1:], strict=False):
                changed = step.rng.items() - following.rng.items()
                names.update(name for name, _ in changed)
    return names


def _rates_text(before: StepRecord, after: StepRecord) -> str:
    for expected, rate in zip(before.learning_rates, after.learning_rates, strict=False):
        if rate != expected:
            return f"the learning rate is {rate:.6g} instead of {expected:.6g}"
    return "the optimizer has another number of parameter groups"


def _state_text(expected: dict[str, str], state: dict[str, str]) -> str:
    missing = [name for name in expected if name not in state]
    if missing:
        return f"the optimizer state differs: {', '.join(missing)} missing"
    different = [name for name in expected if expected[name] != state[name]]
    return f"the optimizer state differs: {', '.join(different or state)}"


# ---- a resumed run


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """How a resumed run differs from the undisturbed one; ``rounding`` is the largest relative difference of norms."""

    difference: Difference | None = None
    rounding: float = 0.0


def compare_resumed(baseline: TrialRecord, trial: "ResumeTrial", *, exact: bool = True) -> Resumed:
    """Find the first thing in which a resumed run differs from the undisturbed one.

    DDP adds up gradients in another order in the first step of a process; with more than two ranks this changes the last
    digits, which is not a difference. Without ``exact``, the script does not even repeat itself bitwise: only data, learning rates and scale are compared.
    """
    resumed, expected = trial.resumed, trial.newest_step
    after = f"after a stop at step {trial.stop.after_step} ({trial.stop.how})"
    saves = [save for save in trial.stopped.saves if save.step == expected]

    def differs(kind: str, step: int, what: str, change: FirstChange | None = None) -> Resumed:
        return Resumed(difference=_of_resume(baseline, saves, kind, step, what, change))

    def torn_or(kind: str) -> str:
        if trial.stop.how == "in-save":
            return "torn-checkpoint"
        return kind

    if not resumed.steps and resumed.trouble:
        what = f"{after}, the script does not resume: {_first_line(resumed.trouble)}"
        return differs(torn_or("resume-failed"), expected, what)
    if not resumed.steps:
        what = f"{after}, the script made no more steps, and exited without an error"
        return differs(torn_or("ended-early"), expected, what)
    start = resumed_from(baseline, resumed, expected)
    if start is None and not exact:
        start = expected
    if start is None:
        what = f"{after}, the weights are not those of any step of the undisturbed run"
        return differs(torn_or("weights"), expected, what)
    if start == 0 and expected > 0 and _loaded_the_rest(baseline, resumed, expected):
        what = f"{after}, the weights are those of the start, but the rest of the checkpoint was loaded"
        return differs("weights", expected, what)
    if start == 0 and expected > 0:
        what = f"{after}, the script started from zero instead of step {expected}"
        return differs("started-from-zero", 1, what)
    if start < expected:
        what = f"{after}, the script resumed from step {start}; its newest checkpoint is of step {expected}"
        return differs("older-checkpoint", start, what)
    change, rounding = _first_change(baseline, resumed, start, exact=exact)
    if change is not None:
        first = change.changes[0]
        what = first.what
        if first.kind == "data-order":
            what = data_order(baseline.ranks[change.rank], resumed.ranks[change.rank], start)
        what = f"resumed from step {start}, step {change.step}: {what}"
        return differs(first.kind, change.step, what, change)
    last = start + resumed.steps
    if last < baseline.steps and resumed.trouble:
        what = f"{after}, it failed after step {last}: {_first_line(resumed.trouble)}"
        return differs("resume-failed", last, what)
    if last < baseline.steps:
        what = f"resumed from step {start}, the script exited after step {last} of {baseline.steps}"
        return differs("ended-early", last, what)
    return Resumed(rounding=rounding)


class FirstChange(NamedTuple):
    """The first step in which a rank of a resumed run differs, and in what."""

    step: int
    rank: int
    changes: list[Change]


def _of_resume(
    baseline: TrialRecord,
    saves: Sequence[EventRecord],
    kind: str,
    step: int,
    what: str,
    change: FirstChange | None,
) -> Difference:
    line, rank = "", None
    keys: list[str] = []
    also: list[str] = []
    if saves:
        line, keys = saves[-1].line, saves[-1].keys
    if kind == "data-order":
        line = baseline.ranks[0].line_of("loader")
    if change is not None:
        rank = change.rank
        for other in change.changes:
            if other.kind != kind and other.kind not in also:
                also.append(other.kind)
    return Difference(
        property="resume",
        kind=kind,
        step=step,
        what=what,
        rank=rank,
        also=tuple(also),
        line=line,
        keys=tuple(keys),
    )


def _first_line(trouble: str) -> str:
    return textwrap.shorten(trouble.splitlines()[0], _LONGEST_ERROR, placeholder=" …")


def _loaded_the_rest(baseline: TrialRecord, resumed: TrialRecord, expected: int) -> bool:
    """Return whether a run without the weights of its checkpoint has the optimizer state or learning rate of it."""
    steps, first = baseline.ranks[0].steps, resumed.ranks[0].steps[0]
    if first.state_before and first.state_before == steps[expected - 1].state:
        return True
    at_start, at_expected = steps[0], steps[min(expected, len(steps) - 1)]
    has_schedule = at_start.learning_rates != at_expected.learning_rates
    return has_schedule and first.learning_rates == at_expected.learning_rates


def resumed_from(baseline: TrialRecord, resumed: TrialRecord, expected: int) -> int | None:
    """Return after which step of the undisturbed run a resumed one continues, by its weights."""
    weights = resumed.ranks[0].steps[0].weights_before
    steps = baseline.ranks[0].steps
    known = [steps[0].weights_before, *(step.weights for step in steps)]
    equal = [number for number, candidate in enumerate(known) if candidate == weights]
    return min(equal, key=lambda number: abs(number - expected), default=None)


def _first_change(
    baseline: TrialRecord, resumed: TrialRecord, start: int, *, exact: bool
) -> tuple[FirstChange | None, float]:
    """Return the first change that is not rounding, and the largest rounding before it."""
    rounding = 0.0
    allowed = ROUNDING.get(baseline.dtype, ROUNDING["float32"]) / GROWTH
    drawn = _generators_drawn_from(baseline, resumed)
    for number in range(min(resumed.steps, baseline.steps - start)):
        for rank, other in zip(baseline.ranks, resumed.ranks, strict=True):
            before, after = rank.steps[start + number], other.steps[number]
            changes: list[Change] = []
            if number == 0 and exact:
                changes += _restored_otherwise(rank, after, start)
            changes += _changes(before, after, drawn)
            changes += _copies(rank, before, after, start)
            if number == 0:  # half a step was lost, which explains all the rest
                changes.sort(key=lambda change: change.kind != "accumulation")
            apart = _apart(before, after)
            may_be_rounding = rounding > 0 or (bool(changes) and changes[0].kind in _RESULTS)
            if changes and exact and apart <= allowed and may_be_rounding:
                rounding = max(rounding, apart)
                allowed = ROUNDING.get(baseline.dtype, ROUNDING["float32"])
                changes = _never_rounded(changes)
            if not exact:
                changes = _never_rounded(changes)
            if changes:
                return FirstChange(start + number + 1, rank.rank, changes), rounding
    return None, rounding


def _never_rounded(changes: Sequence[Change]) -> list[Change]:
    return [change for change in changes if change.kind in _NEVER_ROUNDED]


def _restored_otherwise(rank: RankRecord, after: StepRecord, start: int) -> list[Change]:
    """Return what differs before the first step of a resumed run."""
    weights = rank.steps[start].weights_before
    state = rank.steps[start].state_before or {}
    if start:
        weights, state = rank.steps[start - 1].weights, rank.steps[start - 1].state
    changes = []
    if after.weights_before != weights:
        changes.append(Change("weights", "the weights before the step differ"))
    restored = after.state_before or {}
    if restored != state:
        changes.append(Change("optimizer-state", _state_text(state, restored)))
    return changes


def _apart(before: StepRecord, after: StepRecord) -> float:
    """Return the largest relative difference of losses and norms of a step."""
    pairs = [
        (
            before.replicated_square + before.sharded_square,
            after.replicated_square + after.sharded_square,
        ),
        (before.weights_norm, after.weights_norm),
    ]
    for expected, batch in zip(before.micro_batches, after.micro_batches, strict=False):
        if expected.loss is not None and batch.loss is not None:
            pairs.append((expected.loss, batch.loss))
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def _copies(
    rank: RankRecord, before: StepRecord, after: StepRecord, start: int
) -> Iterator[Change]:
    """Yield a change if a copy of the weights that changes, such as their average, is another one."""
    if not start:
        return
    old = set(rank.steps[start - 1].copies)
    changing = set(before.copies) - old
    if old and not changing <= set(after.copies):
        what = "a second copy of the weights, such as an average (EMA), differs"
        yield Change("weight-copy", what)


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
    samples = [sample for batch in read for sample in batch.samples]
    repeated_samples = _samples_of(_epoch_of_last(before)).intersection(samples)
    text = "the samples come in another order"
    if repeated_samples:
        count = sum(sample in repeated_samples for sample in samples)
        return f"{text}; {count} of {len(samples)} were already used in this epoch"
    if not _samples_of(batches).intersection(samples):
        text += ", or are changed in another way (random augmentation)"
    return text


def _count(batches: Sequence[MicroBatch]) -> str:
    samples = sum(len(batch.samples) for batch in batches)
    return f"{len(batches)} batches ({samples} samples)"


def _samples_of(batches: Sequence[MicroBatch]) -> set[str]:
    samples: set[str] = set()
    for batch in batches:
        samples.update(batch.samples)
    return samples


def _epoch_of_last(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the batches of the last iteration of a loader; all of them if no loader is known."""
    if not batches or batches[-1].place is None:
        return list(batches)
    epoch = batches[-1].place[:2]
    return [batch for batch in batches if batch.place is not None and batch.place[:2] == epoch]
