"""Compare trials and name the first thing that differs. Pure functions of records."""

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.prove.records import MicroBatch, RankRecord, StepRecord, TrialRecord
from torchmuster.prove.trials import ResumeTrial

Property = Literal["determinism", "resume", "ranks"]

# Relative difference of gradient norms that only the order of additions explains, in the first step.
_ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
_GROWTH = 10.0  # of the rounding in later steps, whose weights differ already
_NEAR = 0.3  # a factor is that of the ranks if it is so much nearer to it than to 1, as logarithms
_MOSTLY = 0.5  # share of the samples
_FEW_SAMPLES = 4
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


# ---- two runs from the start


def compare_repeated(first: TrialRecord, second: TrialRecord) -> Difference | None:
    """Return where two runs of the same script differ first."""
    drawn = _drawn_from(first, second)
    for step in range(min(first.steps, second.steps)):
        for one, other in zip(first.ranks, second.ranks, strict=True):
            found = list(_differing(one.steps[step], other.steps[step], drawn, is_first=step == 0))
            if found:
                kind, what = found[0]
                return Difference(
                    property="determinism",
                    kind=kind,
                    step=0 if kind == "weights" and step == 0 else step + 1,
                    rank=one.rank,
                    what=what,
                    also=tuple(kind for kind, _ in found[1:]),
                    line=one.line_of("loader") if kind == "data-order" else "",
                )
    if first.steps != second.steps:
        return Difference(
            property="determinism",
            kind="steps",
            step=min(first.steps, second.steps),
            what=f"one run made {first.steps} steps, the other one {second.steps}",
        )
    return None


def _differing(
    one: StepRecord, other: StepRecord, drawn: set[str], *, is_first: bool
) -> Iterator[tuple[str, str]]:
    """Yield what differs between the same step of two runs, causes before effects."""
    if is_first and one.weights_before != other.weights_before:
        yield "weights", "the weights before the first step differ"
    if one.buffers != other.buffers:
        yield "buffers", "the buffers of the model differ"
    own, others = len(one.micro_batches), len(other.micro_batches)
    if own != others:
        yield "accumulation", f"the step has {others} micro-batches instead of {own}"
    elif _inputs(one) != _inputs(other):
        yield "data-order", "the model gets other samples"
    if one.scale != other.scale:
        yield "loss-scale", f"the loss scale is {other.scale} instead of {one.scale}"
    if _computes_otherwise(one, other):
        names = [name for name in one.rng if name in drawn and one.rng[name] != other.rng.get(name)]
        if names:
            yield "rng", f"the random state of {', '.join(names)} differs, and so does the result"
        else:
            yield "computation", "the same weights and samples give another result"
    if one.learning_rates != other.learning_rates:
        yield "learning-rate", _rates(one, other)
    if one.settings != other.settings:
        yield "optimizer-state", "settings of the optimizer differ"
    if one.state != other.state:
        yield "optimizer-state", f"the optimizer state differs: {_names(one.state, other.state)}"
    if one.weights != other.weights:
        yield "weights", "the weights after the step differ"


def _drawn_from(*trials: TrialRecord) -> set[str]:
    """Return the random generators from which steps draw: those whose state changes."""
    return {
        name
        for trial in trials
        for rank in trial.ranks
        for one, following in itertools.pairwise(rank.steps)
        for name, state in one.rng.items()
        if following.rng.get(name) != state
    }


def _inputs(step: StepRecord) -> list[str]:
    return [batch.inputs for batch in step.micro_batches]


def _computes_otherwise(one: StepRecord, other: StepRecord) -> bool:
    losses = [[batch.loss for batch in step.micro_batches] for step in (one, other)]
    return losses[0] != losses[1] or one.gradients != other.gradients


def _rates(one: StepRecord, other: StepRecord) -> str:
    pairs = zip(one.learning_rates, other.learning_rates, strict=False)
    differing = next(((a, b) for a, b in pairs if a != b), None)
    if differing is None:
        return "the optimizer has another number of parameter groups"
    return f"the learning rate is {differing[1]:.6g} instead of {differing[0]:.6g}"


def _names(one: dict[str, str], other: dict[str, str]) -> str:
    missing = [name for name in one if name not in other]
    if missing:
        return f"{', '.join(missing)} missing"
    return ", ".join(name for name in one if one[name] != other[name]) or ", ".join(other)


# ---- a resumed run


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """How a resumed run differs from the undisturbed one; ``rounding`` is the largest relative difference of norms."""

    difference: Difference | None
    rounding: float = 0.0


def compare_resumed(baseline: TrialRecord, trial: ResumeTrial, *, exact: bool = True) -> Resumed:
    """Find the first thing in which a resumed run differs from the undisturbed one.

    DDP adds up gradients in another order in the first step of a process; with more than two ranks this changes the last
    digits, which is not a difference. Without ``exact``, the script does not even repeat itself bitwise: only data, learning rates and scale are compared.
    """
    resumed = trial.resumed
    saves = trial.stopped.saves
    expected = max((save.step for save in saves), default=0)
    save = next((save for save in reversed(saves) if save.step == expected), None)
    after = f"after a stop at step {trial.stop.after_step} ({trial.stop.how})"

    def differs(kind: str, step: int, what: str, **more: object) -> Resumed:
        loader = baseline.ranks[0].line_of("loader")
        line = loader if kind == "data-order" else (save.line if save else "")
        return Resumed(
            difference=Difference(
                property="resume",
                kind=kind,
                step=step,
                what=what,
                line=line,
                keys=tuple(save.keys) if save else (),
                **more,  # type: ignore[arg-type]
            )
        )

    if not resumed.steps:
        kind = "torn-checkpoint" if trial.torn else "resume-failed"
        if not resumed.trouble:
            what = f"{after}, the script made no more steps, and exited without an error"
            return differs("torn-checkpoint" if trial.torn else "ended-early", expected, what)
        said = resumed.trouble
        return differs(kind, expected, f"{after}, the script does not resume: {_short(said)}")
    start = resumed_from(baseline, resumed, expected)
    if start is None and not exact:
        start = expected
    if start == 0 and expected > 0 and _loaded_the_rest(baseline, resumed, expected):
        what = f"{after}, the weights are those of the start, but the rest of the checkpoint was loaded"
        return differs("weights", expected, what)
    if start == 0 and expected > 0:
        what = f"{after}, the script started from zero instead of step {expected}"
        return differs("started-from-zero", 1, what)
    if start is None:
        kind = "torn-checkpoint" if trial.torn else "weights"
        what = f"{after}, the weights are not those of any step of the undisturbed run"
        return differs(kind, expected, what)
    if start < expected:
        what = f"{after}, the script resumed from step {start}; its newest checkpoint is of step {expected}"
        return differs("older-checkpoint", start, what)
    found, rounding = _first_difference(baseline, resumed, start, exact=exact)
    if found is None:
        last = start + resumed.steps
        if last < baseline.steps and resumed.trouble:
            said = _short(resumed.trouble)
            return differs("resume-failed", last, f"{after}, it failed after step {last}: {said}")
        if last < baseline.steps:
            what = f"resumed from step {start}, the script exited after step {last} of {baseline.steps}"
            return differs("ended-early", last, what)
        return Resumed(difference=None, rounding=rounding)
    step, rank, kinds = found
    kind, what = kinds[0]
    if kind == "data-order":
        what = data_order(baseline.ranks[rank], resumed.ranks[rank], start)
    return differs(
        kind,
        step,
        f"resumed from step {start}, step {step}: {what}",
        rank=rank,
        also=tuple(dict.fromkeys(name for name, _ in kinds[1:] if name != kind)),
    )


def _short(trouble: str) -> str:
    """Return the first line of an error, without its end if it is long."""
    return textwrap.shorten(trouble.splitlines()[0], _LONGEST_ERROR, placeholder=" …")


def _loaded_the_rest(baseline: TrialRecord, resumed: TrialRecord, expected: int) -> bool:
    """Return whether a run without the weights of its checkpoint has the optimizer state or learning rate of it."""
    steps, first = baseline.ranks[0].steps, resumed.ranks[0].steps[0]
    if first.state_before and first.state_before == steps[expected - 1].state:
        return True
    rates = [steps[number].learning_rates for number in (0, min(expected, len(steps) - 1))]
    return rates[0] != rates[1] and first.learning_rates == rates[1]


def resumed_from(baseline: TrialRecord, resumed: TrialRecord, expected: int) -> int | None:
    """Return after which step of the undisturbed run a resumed one continues, by its weights."""
    weights = resumed.ranks[0].steps[0].weights_before
    steps = baseline.ranks[0].steps
    known = [steps[0].weights_before, *(step.weights for step in steps)]
    found = [number for number, one in enumerate(known) if one == weights]
    return min(found, key=lambda number: abs(number - expected), default=None)


def _first_difference(
    baseline: TrialRecord, resumed: TrialRecord, start: int, *, exact: bool
) -> tuple[tuple[int, int, list[tuple[str, str]]] | None, float]:
    """Return the first step, rank and kinds of differences, and the largest rounding before it."""
    parameters = baseline.ranks[0].parameters
    allowed = _ROUNDING.get(parameters.dtype if parameters else "float32", 1e-4) / _GROWTH
    rounding = 0.0
    drawn = _drawn_from(baseline, resumed)
    for number in range(min(resumed.steps, baseline.steps - start)):
        for one, other in zip(baseline.ranks, resumed.ranks, strict=True):
            before = one.steps[start - 1] if start else None
            own, others = one.steps[start + number], other.steps[number]
            kinds: list[tuple[str, str]] = []
            if number == 0 and exact:
                weights = before.weights if before else own.weights_before
                if others.weights_before != weights:
                    kinds.append(("weights", "the weights before the step differ"))
                state = before.state if before else own.state_before or {}
                if (others.state_before or {}) != state:
                    names = _names(state, others.state_before or {})
                    kinds.append(("optimizer-state", f"the optimizer state differs: {names}"))
            kinds += _differing(own, others, drawn, is_first=False)
            kinds += _copies(before, own, others)
            if number == 0 and any(kind == "accumulation" for kind, _ in kinds):
                kinds = [one for one in kinds if one[0] == "accumulation"] + kinds
            apart = _apart(own, others)
            limit = allowed * (_GROWTH if rounding else 1.0)
            if kinds and exact and apart <= limit and (rounding or _is_rounding(kinds)):
                rounding = max(rounding, apart)
                kinds = [kind for kind in kinds if kind[0] in _EXACT]
            if not exact:
                kinds = [kind for kind in kinds if kind[0] in _EXACT]
            if kinds:
                return (start + number + 1, one.rank, kinds), rounding
    return None, rounding


# What never depends on rounding.
_EXACT = ("accumulation", "data-order", "loss-scale", "learning-rate")


def _is_rounding(kinds: Sequence[tuple[str, str]]) -> bool:
    """Return whether the same weights, data and state gave a slightly different result."""
    return kinds[0][0] in ("computation", "rng")


def _apart(one: StepRecord, other: StepRecord) -> float:
    """Return the largest relative difference of losses and norms of a step."""
    pairs = [
        (
            one.replicated_square + one.sharded_square,
            other.replicated_square + other.sharded_square,
        ),
        (one.weights_norm, other.weights_norm),
        *(
            (own.loss, its.loss)
            for own, its in zip(one.micro_batches, other.micro_batches, strict=False)
            if own.loss is not None and its.loss is not None
        ),
    ]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def _copies(
    before: StepRecord | None, own: StepRecord, others: StepRecord
) -> Iterator[tuple[str, str]]:
    """Yield a difference if a copy of the weights that changes, such as their average, is another one."""
    old = set(before.copies) if before else set()
    changing = [one for one in own.copies if one not in old and len(old) > 0]
    if changing and not set(changing) <= set(others.copies):
        yield "weight-copy", "a second copy of the weights, such as an average (EMA), differs"


def data_order(baseline: RankRecord, resumed: RankRecord, start: int) -> str:
    """Describe in which way the samples of a resumed run differ."""
    before = [batch for step in baseline.steps[:start] for batch in step.micro_batches]
    after = [batch for step in baseline.steps[start:] for batch in step.micro_batches]
    got = [batch for step in resumed.steps for batch in step.micro_batches]
    seen = {batch.inputs: place for place, batch in enumerate(before)}
    first = got[0].inputs
    if first in seen:
        repeated = before[seen[first] :]
        samples = sum(len(batch.samples) for batch in repeated)
        again = " from the beginning of the epoch" if _begins_epoch(before[seen[first]]) else ""
        return f"data starts again{again}: {len(repeated)} batches ({samples} samples) are repeated on this rank"
    later = [batch.inputs for batch in after]
    if first in later:
        skipped = after[: later.index(first)]
        samples = sum(len(batch.samples) for batch in skipped)
        return f"{len(skipped)} batches ({samples} samples) are skipped on this rank"
    epoch = _same_epoch(before)
    old = {sample for batch in epoch for sample in batch.samples}
    new = [sample for batch in got for sample in batch.samples]
    repeated_count = sum(sample in old for sample in new)
    known = {sample for batch in (*before, *after) for sample in batch.samples}
    strange = sum(sample not in known for sample in new)
    text = "the samples come in another order"
    if repeated_count:
        text += f"; {repeated_count} of {len(new)} were already used in this epoch"
    elif strange == len(new):
        text += ", or are changed in another way (random augmentation)"
    return text


def _begins_epoch(batch: MicroBatch) -> bool:
    place = batch.place
    return place is not None and place[2] <= 1  # libraries read one batch ahead


def _same_epoch(before: Sequence[MicroBatch]) -> list[MicroBatch]:
    places = [batch.place for batch in before]
    if not places or places[-1] is None:
        return list(before)
    last = places[-1][:2]
    return [
        batch for batch, place in zip(before, places, strict=True) if place and place[:2] == last
    ]


# ---- ranks of one run


def compare_ranks(record: TrialRecord) -> list[Difference]:
    """Return what is wrong between the ranks of a run, and between its epochs and workers."""
    checks = (_same_data, _uneven, _replicas, _buffers, _epoch_order, _worker_seeds)
    return [found for check in checks if (found := check(record)) is not None]


def _of_ranks(kind: str, step: int, what: str, **more: object) -> Difference:
    return Difference(property="ranks", kind=kind, step=step, what=what, **more)  # type: ignore[arg-type]


def _first_pass(samples: Iterable[str]) -> list[str]:
    """Return the samples up to the first one that comes again: a loader that is not known may repeat epochs."""
    seen: dict[str, None] = {}
    for sample in samples:
        if sample in seen:
            break
        seen[sample] = None
    return list(seen)


def _same_data(record: TrialRecord) -> Difference | None:
    if len(record.ranks) < 2:
        return None
    samples = [
        _first_pass(
            sample
            for step in rank.steps[: record.steps]
            for batch in step.micro_batches
            if batch.place is None or batch.place[1] == 0
            for sample in batch.samples
        )
        for rank in record.ranks
    ]
    first = set(samples[0])
    if len(first) < _FEW_SAMPLES:
        return None
    for rank, own in enumerate(samples[1:], start=1):
        shared = sum(sample in first for sample in own)
        if own and shared / len(own) > _MOSTLY and len(set(own)) >= _FEW_SAMPLES:
            share = round(100 * shared / len(own))
            what = f"{share} % of the samples of rank {rank} are also read by rank 0 ({shared} of {len(own)})"
            line = record.ranks[0].line_of("loader")
            return _of_ranks("same-data", 1, what, rank=rank, line=line)
    return None


def _uneven(record: TrialRecord) -> Difference | None:
    made = [len(rank.steps) for rank in record.ranks]
    for step in range(record.steps):
        counts = [len(rank.steps[step].micro_batches) for rank in record.ranks]
        if len(set(counts)) > 1:
            what = f"ranks have {counts} micro-batches in the same step"
            return _of_ranks("uneven-batches", step + 1, what)
    samples = [_samples_of_first_epoch(rank) for rank in record.ranks]
    if all(samples) and len(set(samples)) > 1:
        what = f"ranks read different numbers of samples in one epoch: {list(samples)}"
        line = record.ranks[0].line_of("loader")
        return _of_ranks("uneven-batches", record.steps, what, line=line)
    if max(made, default=0) - record.steps > 1:
        return _of_ranks("uneven-batches", record.steps, f"ranks made {made} steps")
    return None


def _samples_of_first_epoch(rank: RankRecord) -> int:
    """Return the samples of the first iteration of the training loader; 0 if it did not end."""
    batches = [batch for step in rank.steps for batch in step.micro_batches if batch.place]
    if not batches or batches[0].place is None:
        return 0
    loader = batches[0].place[0]
    own = [batch for batch in batches if batch.place and batch.place[0] == loader]
    if not any(batch.place and batch.place[1] > 0 for batch in own):
        return 0
    return sum(len(batch.samples) for batch in own if batch.place and batch.place[1] == 0)


def _replicas(record: TrialRecord) -> Difference | None:
    first = record.ranks[0]
    if first.parameters is None:
        return None
    kept = [place for place, is_part in enumerate(first.parameters.sharded) if not is_part]
    for step in range(record.steps):
        for rank in record.ranks[1:]:
            own, others = first.steps[step].weights, rank.steps[step].weights
            if len(own) != len(others):
                return _of_ranks("replicas-differ", step + 1, "ranks train different parameters")
            wrong = [place for place in kept if own[place] != others[place]]
            if wrong:
                name = first.parameters.names[wrong[0]]
                what = (
                    f"after step {step + 1}, {len(wrong)} of {len(kept)} parameters of rank {rank.rank} differ from "
                    f"those of rank 0, the first is {name}"
                )
                return _of_ranks("replicas-differ", step + 1, what, rank=rank.rank)
    return None


def _buffers(record: TrialRecord) -> Difference | None:
    for step in range(1, record.steps):
        for rank in record.ranks[1:]:
            if rank.steps[step].buffers != record.ranks[0].steps[step].buffers:
                what = f"the buffers of the model (BatchNorm) differ between rank 0 and rank {rank.rank}"
                return _of_ranks("buffers-differ", step + 1, what, rank=rank.rank)
    return None


def _epoch_order(record: TrialRecord) -> Difference | None:
    rank = record.ranks[0]
    shuffling = {event.values["loader"] for event in rank.of_kind("loader") if event.shuffles}
    epochs: dict[tuple[int, int], list[str]] = {}
    for step in rank.steps:
        for batch in step.micro_batches:
            if batch.place is not None and str(batch.place[0]) in shuffling:
                epochs.setdefault(batch.place[:2], []).extend(batch.samples)
    for (loader, iteration), samples in epochs.items():
        following = epochs.get((loader, iteration + 1), [])
        length = min(len(samples), len(following))
        if length < 2 * _FEW_SAMPLES or len(set(samples)) < _FEW_SAMPLES:
            continue
        if samples[:length] == following[:length]:
            what = f"the loader shuffles, but epochs {iteration + 1} and {iteration + 2} have the same order"
            number = next(
                one.step
                for one in rank.steps
                for batch in one.micro_batches
                if batch.place is not None and batch.place[:2] == (loader, iteration + 1)
            )
            return _of_ranks("epoch-order", number, what, line=rank.line_of("loader"))
    return None


def _worker_seeds(record: TrialRecord) -> Difference | None:
    for rank in record.ranks:
        by_loader: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
        for event in rank.of_kind("worker"):
            values = dict(event.values)
            worker, loader = values.pop("worker"), values.pop("loader")
            by_loader.setdefault((loader, event.step), {})[worker] = values
        for states in by_loader.values():
            for name in ("numpy", "python", "torch"):
                hashes = Counter(one[name] for one in states.values() if name in one)
                if len(states) > 1 and hashes and len(hashes) == 1:
                    what = f"all {len(states)} loader workers begin with the same random state of {name}"
                    line = rank.line_of("loader")
                    return _of_ranks("worker-seeds", 1, what, rank=rank.rank, line=line)
    return None


# ---- other numbers of ranks


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How well two runs with the same global batch agree."""

    largest: float  # relative difference of gradient norms
    steps: int
    difference: Difference | None = None
    why_not: str = ""  # they cannot be compared


def compare_scaled(
    few: TrialRecord, many: TrialRecord, *, names: tuple[str, str], ratio: float, accumulation: bool
) -> Scaling:
    """Compare two runs that must give the same gradients; ``ratio`` is that of their ranks or micro-batches."""
    dtype = few.ranks[0].parameters.dtype if few.ranks[0].parameters else "float32"
    allowed = _ROUNDING.get(dtype, 1e-4)
    layers = few.ranks[0].parameters.layers if few.ranks[0].parameters else []
    largest = 0.0
    for step in range(min(few.steps, many.steps)):
        if Counter(few.samples(step)) != Counter(many.samples(step)):
            return Scaling(
                largest=largest,
                steps=step,
                why_not=f"step {step + 1} has other samples with {names[1]} than with {names[0]}",
            )
        own, others = few.gradient_norm(step), many.gradient_norm(step)
        apart = abs(own - others) / max(own, others, 1e-300)
        if apart > allowed * (_GROWTH if step else 1.0):
            if layers:
                return Scaling(
                    largest=largest,
                    steps=step,
                    why_not=f"{', '.join(layers)} computes with the samples of one rank",
                )
            found = _scaling_difference(
                own, others, step, names=names, ratio=ratio, accumulation=accumulation
            )
            return Scaling(largest=max(largest, apart), steps=step + 1, difference=found)
        largest = max(largest, apart)
    return Scaling(largest=largest, steps=min(few.steps, many.steps))


def _scaling_difference(
    own: float,
    others: float,
    step: int,
    *,
    names: tuple[str, str],
    ratio: float,
    accumulation: bool,
) -> Difference:
    found = others / own if own else float("inf")
    times = f"the gradient norm of step {step + 1} is {others:.5g} with {names[1]} and {own:.5g} with {names[0]}"
    size = abs(math.log(found)) if 0 < found < math.inf else math.inf
    if any(abs(math.log(found / one)) < _NEAR * size for one in (ratio, 1 / ratio)):
        kind = "accumulation-scale" if accumulation else "gradient-scale"
        times += f": a factor of {found:.3g}"
    else:
        kind = "loss-average"
        times += f": {100 * abs(found - 1):.2g} % apart"
    return _of_ranks(kind, step + 1, times)
