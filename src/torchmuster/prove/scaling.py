"""Runs with the same global batch, distributed otherwise: on other ranks, or in more micro-batches. Pure."""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.prove.comparing import GROWTH, Comparison, Difference, rounding_limit
from torchmuster.prove.records import ProofRequest, TrialRecord
from torchmuster.units import plural

_NEAR = 0.3  # a factor is that of the ranks if it is so much nearer to it than to 1, as logarithms
_TINY = 1e-300  # avoids a division by zero


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A run with the same global batch on ``count`` ranks, or in ``count`` micro-batches per step."""

    name: str  # such as "2 ranks"
    check: str  # the name of the check that compares it with the first variation
    count: int
    ranks: int
    arguments: tuple[str, ...]  # of the script


def variations_of(request: ProofRequest, baseline: TrialRecord) -> Iterator[list[Variation]]:
    """Yield groups of runs that must have the same gradients: other ranks, more accumulation."""
    flag = _flag(request.batch_argument)
    batch = max(len(samples.samples) for samples in baseline.ranks[0].micro_batches())
    if flag:
        batch = _value_of(request.command, flag) or batch
    if request.other_ranks:
        if not flag and not request.with_run_folder:
            raise Impossible(
                "whether other numbers of ranks give the same gradients",
                why="the global batch must stay the same",
                fix="name the script's argument for the batch per rank, for example --batch-arg batch_size",
            )
        counts = sorted({request.ranks, *request.other_ranks})
        yield [_on_ranks(request, count, flag, batch) for count in counts]
    if request.accumulation_argument:
        if not flag or batch % 2:
            raise Impossible(
                "--accumulation-arg needs --batch-arg, and an even batch per rank",
                why=f"half the batch is used with twice the accumulation; the batch is {batch}",
                fix="--batch-arg NAME --accumulation-arg NAME",
            )
        yield [_accumulated(request, factor, flag, batch) for factor in (1, 2)]


def _on_ranks(request: ProofRequest, count: int, flag: str, batch: int) -> Variation:
    total = batch * request.ranks
    if total % count:
        raise Impossible(
            f"a global batch of {total} cannot be split over {count} ranks",
            why=f"{request.ranks} ranks have {batch} samples each",
            fix=f"set {flag} so that {count} divides it, or leave out --ranks {count}",
        )
    arguments: tuple[str, ...] = ()
    if flag:
        arguments = (flag, str(total // count))
    name = plural(count, "rank")
    check = name.replace(" ", "-")
    return Variation(name=name, check=check, count=count, ranks=count, arguments=arguments)


def _accumulated(request: ProofRequest, factor: int, batch_flag: str, batch: int) -> Variation:
    flag = _flag(request.accumulation_argument)
    count = factor * (_value_of(request.command, flag) or 1)
    return Variation(
        name=f"{plural(count, 'micro-batch')} per step",
        check="accumulation",
        count=count,
        ranks=request.ranks,
        arguments=(batch_flag, str(batch // factor), flag, str(count)),
    )


def _flag(name: str) -> str:
    if not name or name.startswith("-"):
        return name
    return f"--{name}"


def _value_of(command: Sequence[str], flag: str) -> int | None:
    """Return the number after a flag of a command, as ``--flag 4`` or ``--flag=4``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", nargs="?")
    value = parser.parse_known_args(command[1:])[0].value
    if value is None or not value.isdecimal():
        return None
    return int(value)


def compare_scaled(
    few: TrialRecord, many: TrialRecord, first: Variation, second: Variation
) -> Comparison:
    """Compare the gradient norms of two variations, which must be the same up to rounding."""
    largest = 0.0
    limit = rounding_limit(few)
    steps = min(few.steps, many.steps)
    for step in range(steps):
        if few.samples(step) != many.samples(step):
            why = f"step {step + 1} has other samples with {second.name} than with {first.name}"
            return Comparison(why_not=why)
        expected, norm = few.gradient_norm(step), many.gradient_norm(step)
        apart = abs(expected - norm) / max(expected, norm, _TINY)
        largest = max(largest, apart)
        if apart > limit:
            parameters = few.ranks[0].parameters
            if parameters is not None and parameters.layers:
                why = f"{', '.join(parameters.layers)} computes with the samples of one rank"
                return Comparison(why_not=why)
            return Comparison(difference=_other_gradients(step, expected, norm, first, second))
        limit = GROWTH * rounding_limit(few)  # from now on the weights differ already
    return Comparison(rounding=largest, steps=steps)


def _other_gradients(
    step: int, expected: float, norm: float, first: Variation, second: Variation
) -> Difference:
    """Name the mistake that changes the norm of all gradients by this factor."""
    factor = max(norm, _TINY) / max(expected, _TINY)
    ratio = second.count / first.count
    kind = "loss-average"
    if _is_near(factor, ratio) or _is_near(factor, 1 / ratio):
        kind = "gradient-scale"
        if second.check == "accumulation":
            kind = "accumulation-scale"
    what = (
        f"the gradient norm of step {step + 1} is {norm:.5g} with {second.name} and {expected:.5g} "
        f"with {first.name}: a factor of {factor:.3g}"
    )
    return Difference(kind=kind, step=step + 1, what=what)


def _is_near(factor: float, ratio: float) -> bool:
    """Return whether a factor is rather this ratio than 1."""
    return abs(math.log(factor / ratio)) < _NEAR * abs(math.log(factor))
