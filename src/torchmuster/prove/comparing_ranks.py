"""Compare the ranks of a run, and runs on other numbers of ranks. Pure functions of records."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchmuster.prove.comparing import GROWTH, ROUNDING, Comparison, Difference
from torchmuster.prove.records import MicroBatch, RankRecord, TrialRecord

_NEAR = 0.3  # a factor is that of the ranks if it is so much nearer to it than to 1, as logarithms
_MOST = 0.5  # share of the samples
_FEW_SAMPLES = 4


def compare_ranks(record: TrialRecord) -> list[Difference]:
    """Return what is wrong between the ranks of a run, and between its epochs and workers."""
    checks = (_same_data, _uneven, _replicas, _buffers, _epoch_order, _worker_seeds)
    differences = [check(record) for check in checks]
    return [difference for difference in differences if difference is not None]


def _of_ranks(kind: str, step: int, what: str, **fields: Any) -> Difference:
    return Difference(property="ranks", kind=kind, step=step, what=what, **fields)


# ---- the data of ranks, epochs and workers


def _same_data(record: TrialRecord) -> Difference | None:
    samples = [_first_epoch(rank, record.steps) for rank in record.ranks]
    first = samples[0]
    if len(first) < _FEW_SAMPLES:
        return None
    for rank, own in enumerate(samples[1:], start=1):
        shared = len(own & first)
        if len(own) >= _FEW_SAMPLES and shared / len(own) > _MOST:
            share = round(100 * shared / len(own))
            what = f"{share} % of the samples of rank {rank} are also read by rank 0 ({shared} of {len(own)})"
            line = record.ranks[0].loader_line
            return _of_ranks("same-data", 1, what, rank=rank, line=line)
    return None


def _first_epoch(rank: RankRecord, steps: int) -> set[str]:
    """Return the samples up to the first one that comes again: a loader that is not known may repeat epochs."""
    seen: set[str] = set()
    for step in rank.steps[:steps]:
        for batch in step.micro_batches:
            if batch.place is not None and batch.place[1] > 0:
                continue
            for sample in batch.samples:
                if sample in seen:
                    return seen
                seen.add(sample)
    return seen


def _uneven(record: TrialRecord) -> Difference | None:
    for step in range(record.steps):
        counts = [len(rank.steps[step].micro_batches) for rank in record.ranks]
        if len(set(counts)) > 1:
            what = f"ranks have {counts} micro-batches in the same step"
            return _of_ranks("uneven-batches", step + 1, what)
    samples = [_samples_of_first_epoch(rank) for rank in record.ranks]
    if all(samples) and len(set(samples)) > 1:
        what = f"ranks read different numbers of samples in one epoch: {samples}"
        line = record.ranks[0].loader_line
        return _of_ranks("uneven-batches", record.steps, what, line=line)
    made = [len(rank.steps) for rank in record.ranks]
    if max(made) - record.steps > 1:
        return _of_ranks("uneven-batches", record.steps, f"ranks made {made} steps")
    return None


def _samples_of_first_epoch(rank: RankRecord) -> int:
    """Return the samples of the first iteration of the training loader; 0 if it did not end."""
    epochs = _epochs(rank.micro_batches())
    if not epochs:
        return 0
    loader, iteration = next(iter(epochs))
    if iteration > 0 or (loader, iteration + 1) not in epochs:
        return 0
    return len(epochs[loader, iteration])


def _epochs(batches: Iterable[MicroBatch]) -> dict[tuple[int, int], list[str]]:
    """Return the samples of each iteration of each loader, in order."""
    epochs: dict[tuple[int, int], list[str]] = {}
    for batch in batches:
        if batch.place is not None:
            epochs.setdefault(batch.place[:2], []).extend(batch.samples)
    return epochs


def _epoch_order(record: TrialRecord) -> Difference | None:
    rank = record.ranks[0]
    shuffling = {event.values["loader"] for event in rank.of_kind("loader") if event.shuffles}
    epochs = _epochs(rank.micro_batches())
    for (loader, iteration), samples in epochs.items():
        following = epochs.get((loader, iteration + 1), [])
        length = min(len(samples), len(following))
        if str(loader) not in shuffling or length < 2 * _FEW_SAMPLES:
            continue
        if len(set(samples)) >= _FEW_SAMPLES and samples[:length] == following[:length]:
            what = f"the loader shuffles, but epochs {iteration + 1} and {iteration + 2} have the same order"
            step = _first_step_of(rank, (loader, iteration + 1))
            return _of_ranks("epoch-order", step, what, line=rank.loader_line)
    return None


def _first_step_of(rank: RankRecord, epoch: tuple[int, int]) -> int:
    for step in rank.steps:
        for batch in step.micro_batches:
            if batch.place is not None and batch.place[:2] == epoch:
                return step.step
    raise ValueError(epoch)


def _worker_seeds(record: TrialRecord) -> Difference | None:
    for rank in record.ranks:
        workers: dict[tuple[str, int], list[dict[str, str]]] = {}
        for event in rank.of_kind("worker"):
            workers.setdefault((event.values["loader"], event.step), []).append(event.values)
        for states in workers.values():
            for name in ("numpy", "python", "torch"):
                hashes = {state.get(name) for state in states}
                if len(states) > 1 and len(hashes) == 1 and None not in hashes:
                    what = f"all {len(states)} loader workers begin with the same random state of {name}"
                    line = rank.loader_line
                    return _of_ranks("worker-seeds", 1, what, rank=rank.rank, line=line)
    return None


# ---- the model of ranks


def _replicas(record: TrialRecord) -> Difference | None:
    first = record.ranks[0]
    if first.parameters is None:
        return None
    whole = [index for index, is_part in enumerate(first.parameters.sharded) if not is_part]
    for step in range(record.steps):
        expected = first.steps[step].weights
        for rank in record.ranks[1:]:
            weights = rank.steps[step].weights
            if len(weights) != len(expected):
                return _of_ranks("replicas-differ", step + 1, "ranks train different parameters")
            wrong = [index for index in whole if weights[index] != expected[index]]
            if wrong:
                name = first.parameters.names[wrong[0]]
                what = (
                    f"after step {step + 1}, {len(wrong)} of {len(whole)} parameters of rank {rank.rank} differ from "
                    f"those of rank 0, the first is {name}"
                )
                return _of_ranks("replicas-differ", step + 1, what, rank=rank.rank)
    return None


def _buffers(record: TrialRecord) -> Difference | None:
    for step in range(1, record.steps):
        expected = record.ranks[0].steps[step].buffers
        for rank in record.ranks[1:]:
            if rank.steps[step].buffers != expected:
                what = f"the buffers of the model (BatchNorm) differ between rank 0 and rank {rank.rank}"
                return _of_ranks("buffers-differ", step + 1, what, rank=rank.rank)
    return None


# ---- the same global batch, distributed otherwise


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A run with the same global batch on ``count`` ranks, or in ``count`` micro-batches per step."""

    name: str  # such as "2 ranks"
    count: int
    ranks: int
    arguments: tuple[str, ...]  # of the script
    check: str  # the name of the check that compares it with the first variation


def compare_scaled(
    few: TrialRecord, many: TrialRecord, first: Variation, second: Variation
) -> Comparison:
    """Compare the runs of two variations, which must have the same gradients."""
    largest = 0.0
    for step in range(min(few.steps, many.steps)):
        if few.samples(step) != many.samples(step):
            why = f"step {step + 1} has other samples with {second.name} than with {first.name}"
            return Comparison(why_not=why)
        expected, norm = few.gradient_norm(step), many.gradient_norm(step)
        apart = abs(expected - norm) / max(expected, norm, 1e-300)
        largest = max(largest, apart)
        allowed = ROUNDING.get(few.dtype, ROUNDING["float32"])
        if step:  # the weights differ already
            allowed *= GROWTH
        if apart <= allowed:
            continue
        parameters = few.ranks[0].parameters
        if parameters is not None and parameters.layers:
            why = f"{', '.join(parameters.layers)} computes with the samples of one rank"
            return Comparison(why_not=why)
        difference = _scaling_difference(expected, norm, step, first, second)
        return Comparison(difference=difference)
    return Comparison(apart=largest, steps=min(few.steps, many.steps))


def _scaling_difference(
    expected: float, norm: float, step: int, first: Variation, second: Variation
) -> Difference:
    what = (
        f"the gradient norm of step {step + 1} is {norm:.5g} with {second.name} and {expected:.5g} "
        f"with {first.name}"
    )
    factor = math.inf
    if expected:
        factor = norm / expected
    ratio = second.count / first.count
    if _is_near(factor, ratio) or _is_near(factor, 1 / ratio):
        kind = "gradient-scale"
        if second.check == "accumulation":
            kind = "accumulation-scale"
        return _of_ranks(kind, step + 1, f"{what}: a factor of {factor:.3g}")
    what += f": {100 * abs(factor - 1):.2g} % apart"
    return _of_ranks("loss-average", step + 1, what)


def _is_near(factor: float, ratio: float) -> bool:
    """Return whether a factor is rather this ratio than 1."""
    if not 0 < factor < math.inf:
        return False
    return abs(math.log(factor / ratio)) < _NEAR * abs(math.log(factor))
