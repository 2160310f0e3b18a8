"""Criteria such as ``nn.CrossEntropyLoss()`` as losses of a model and a batch, weighted exactly."""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from torchmuster.errors import Impossible

Criterion: TypeAlias = Callable[[Any, Any], torch.Tensor]


def inputs_and_targets(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Split a batch into the model's inputs and the targets, which are its last item."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    raise Impossible(
        f"a batch must be (inputs, targets), but this one is a {type(batch).__name__}",
        why="the criterion is called as criterion(model(inputs), targets)",
        fix="return pairs from the dataset, or write the loop with "
        "torchmuster.train.step.TrainStep",
    )


def loss_and_count(
    criterion: Criterion, output: Any, targets: Any
) -> tuple[torch.Tensor, torch.Tensor | int | None]:
    """Return ``(total, count)`` if the criterion has its own count, else ``(mean, None)``.

    Cross entropy ignores targets (``ignore_index``) and weights classes, so its mean is not the
    mean over the samples: the means of two batches must be weighted by their counts. A sum is
    divided by the number of samples.
    """
    if (
        isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
        and criterion.reduction == "mean"
        and not targets.is_floating_point()
    ):
        summed = copy.copy(criterion)
        summed.reduction = "sum"
        # On the device: selecting the counted targets would need their number on the host.
        counts = targets != criterion.ignore_index
        if criterion.weight is None:
            return summed(output, targets), counts.sum()
        weights = criterion.weight[targets.where(counts, 0)]
        return summed(output, targets), weights.where(counts, 0).sum()
    loss = criterion(output, targets)
    if getattr(criterion, "reduction", "mean") == "sum":
        return loss, len(targets)
    return loss, None


def loss_of_pairs(
    criterion: Criterion, device: torch.device
) -> Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]]:
    """Return the loss of a model and a batch ``(inputs, targets)``; class weights go to the device."""
    if isinstance(criterion, nn.Module):
        criterion.to(device)

    def loss(
        model: nn.Module, batch: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]:
        inputs, targets = inputs_and_targets(batch)
        value, count = loss_and_count(criterion, model(*inputs), targets)
        return value if count is None else (value, count)

    return loss
