"""One pass over the data with a criterion of torch's kind, and its loss over all ranks."""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.agreement import most_exact, most_exact_type, totals
from torchmuster.train.data.step import Step
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.update import Update
from torchmuster.train.world import World

Criterion: TypeAlias = Callable[[Any, Any], torch.Tensor]

_log = logging.getLogger(__name__)


def inputs_and_targets(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Split a batch into what the model gets and what the criterion compares with: the last of it."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    raise Impossible(
        f"a batch must be (inputs, targets), and this one is a {type(batch).__name__}",
        why="the criterion is called as criterion(model(inputs), targets)",
        fix="let the dataset return pairs, or write the loop with torchmuster.train.update.Update",
    )


def loss_and_count(
    criterion: Criterion, output: Any, targets: Any
) -> tuple[torch.Tensor, torch.Tensor | int | None]:
    """Return ``(total, count)`` where the criterion counts by itself, else ``(mean, None)``.

    Cross entropy leaves out targets (``ignore_index``) and weighs classes, so its mean is not one over the
    samples: the means of two batches must be weighed by what each has counted.
    """
    if (
        isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
        and criterion.reduction == "mean"
        and not targets.is_floating_point()
    ):
        summed = copy.copy(criterion)
        summed.reduction = "sum"
        # On the device: its length would have to be known to pick out what counts.
        counts = targets != criterion.ignore_index
        if criterion.weight is None:
            return summed(output, targets), counts.sum()
        weights = criterion.weight[targets.where(counts, 0)]
        return summed(output, targets), weights.where(counts, 0).sum()
    loss = criterion(output, targets)
    if getattr(criterion, "reduction", "mean") == "sum":
        return loss, len(targets)
    return loss, None


class LossSum:
    """Adds up losses of this rank without waiting for the device; all ranks together make the mean."""

    def __init__(self) -> None:
        self._total: torch.Tensor | float = 0.0
        self._count: torch.Tensor | float = 0.0

    def add(self, loss: torch.Tensor, samples: int, counted: torch.Tensor | int | None) -> None:
        """Add a micro-batch: the mean of its samples, or a total over what was counted."""
        if samples == 0:
            return
        if counted is None:
            loss, counted = loss * samples, samples
        self._total = self._total + most_exact(loss.detach())
        self._count = self._count + counted

    def forget_if(self, skipped: torch.Tensor) -> None:
        """Forget everything if ``skipped`` is not 0; the host does not wait for it."""

        def kept(number: torch.Tensor | float) -> torch.Tensor:
            if not isinstance(number, torch.Tensor):
                dtype = most_exact_type(skipped.device)
                number = torch.full((), number, dtype=dtype, device=skipped.device)
            return number.where(skipped == 0, 0)

        self._total, self._count = kept(self._total), kept(self._count)

    def take_over(self, other: "LossSum") -> None:
        """Add what another one has added up."""
        self._total = self._total + other._total
        self._count = self._count + other._count

    def mean(self, world: World) -> float:
        """Return the mean over everything that all ranks counted (a collective)."""
        total, count = totals([float(self._total), float(self._count)], world)
        return total / count if count else float("nan")


def train(
    model: nn.Module,
    steps: Iterable[Step],
    criterion: Criterion,
    update: Update,
    world: World,
    *,
    precision: Precision = FP32,
    on_step: Callable[[LossSum], None] = lambda losses: None,
) -> float:
    """Train on these steps; return the mean loss of all ranks. ``on_step`` gets each step's losses.

    Losses of a step that was skipped count nowhere.
    """
    model.train()
    whole = LossSum()
    done = 0
    skipped: torch.Tensor | float = 0.0
    for step in steps:
        of_step = LossSum()
        for micro in update.accumulate(step):
            inputs, targets = inputs_and_targets(micro.batch)
            with precision.autocast(world.device):
                loss, counted = loss_and_count(criterion, model(*inputs), targets)
            update.backward(loss, counted)
            of_step.add(loss, micro.samples, counted)
        outcome = update.apply()
        skipped = skipped + outcome.found_inf
        of_step.forget_if(outcome.found_inf)  # what was not learnt from is not told either
        whole.take_over(of_step)
        done += 1
        on_step(of_step)
    update.settle()
    if number := int(skipped):
        _log.warning("%d of %d steps were skipped: their gradients were not finite", number, done)
    return whole.mean(world)
