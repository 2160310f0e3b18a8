"""Evaluation over all ranks with the result of a single process: every sample counts once.

A measure returns sum and count for one batch; idle micro-batches (``samples=0``) take
part in the forward, because all ranks communicate there, and count as 0::

    def measure(model, batch):
        inputs, labels = batch
        right = model(inputs).argmax(-1) == labels
        return {"accuracy": right}           # one value for each sample, or (sum, count)

    print(evaluate(model, loader, measure, world))
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.buffers import share
from torchmuster.train.data.step import Loader, MicroBatch, Step
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.world import World, all_gather_object, most_exact

# (sum, count), or a tensor with one value for each sample.
Value: TypeAlias = tuple[float | torch.Tensor, float | torch.Tensor] | torch.Tensor
Measure: TypeAlias = Callable[[nn.Module, Any], Mapping[str, Value]]


def evaluate(
    model: nn.Module,
    steps: Loader | Iterable[Step],
    measure: Measure,
    world: World,
    precision: Precision = FP32,
) -> dict[str, float]:
    """Return the mean of each measured value over all samples (or items) of all ranks.

    The same on every rank. A value with count 0 is NaN. All ranks get the buffers of rank 0, such
    as BatchNorm's running means.
    """
    # Otherwise each rank would evaluate with its own running statistics, not with the saved ones.
    share(model.buffers(), world)
    sums: dict[str, tuple[Any, Any]] = {}  # sum and count
    with _evaluating(model):
        for micro in _micro_batches(steps):
            with precision.autocast(world.device):
                measured = measure(model, micro.batch)
            for name, value in measured.items():
                total, count = _counted(name, value, micro)
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count)
    sums_of_ranks = all_gather_object(
        {name: [float(number) for number in pair] for name, pair in sums.items()}, world
    )
    names = dict.fromkeys(name for of_rank in sums_of_ranks for name in of_rank)
    means = {}
    for name in names:
        means[name] = _mean([of_rank[name] for of_rank in sums_of_ranks if name in of_rank])
    return means


@dataclass(frozen=True)
class BestLoss:
    """The lowest evaluated ``loss`` so far, and its step."""

    loss: float
    step: int


def best_loss(numbers: Mapping[str, float], step: int, before: BestLoss | None) -> BestLoss | None:
    """Return the ``loss`` of an evaluation if it is the lowest so far, else None."""
    if "loss" not in numbers:
        raise Impossible(
            "the best checkpoint was requested, but the evaluation does not measure 'loss'",
            why=f"it measures {', '.join(numbers) or 'nothing'}",
            fix="return 'loss' from the measure: the value whose minimum is the best",
        )
    loss = numbers["loss"]
    if not math.isfinite(loss) or (before is not None and loss >= before.loss):
        return None
    return BestLoss(loss, step)


def _micro_batches(steps: Loader | Iterable[Step]) -> Iterator[MicroBatch]:
    for step in steps.epoch(0) if hasattr(steps, "epoch") else steps:
        yield from step


def _counted(name: str, value: Value, micro: MicroBatch) -> tuple[Any, Any]:
    """Return a batch's sum, in the most exact dtype, and its count; 0 for an idle micro-batch."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or len(value) < micro.samples:
            raise MusterError(
                f"the measure {name!r} returned a tensor of shape {tuple(value.shape)} for a "
                f"batch of {micro.samples} samples",
                fix="return (sum, count), or one value for each sample",
            )
        own = most_exact(value[: micro.samples])
        return own.sum(), own.numel()
    if micro.samples == 0:
        return 0.0, 0.0
    total, count = value
    return most_exact(total) if isinstance(total, torch.Tensor) else total, count


def _mean(of_ranks: list[list[float]]) -> float:
    total = math.fsum(total for total, _ in of_ranks)
    count = math.fsum(count for _, count in of_ranks)
    return total / count if count else math.nan


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients, and restore every module's mode afterwards."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True
