"""Optimisers by the names that settings use."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

Name = Literal["adamw", "sgd"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def named(name: Name, *, learning_rate: float, weight_decay: float) -> MakeOptimizer:
    """Return what makes the optimiser once the parameters are there; sgd has a momentum of 0.9.

    adamw is torch's fused one, which takes it from the device whether a step is to be applied: see
    :class:`torchmuster.train.update.Update`. torch's fused SGD cannot do that in its first step, nor for shards.
    """
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(
            parameters, lr=learning_rate, momentum=0.9, weight_decay=weight_decay
        )
    return lambda parameters: torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        weight_decay=weight_decay,
        fused=all(one.is_floating_point() for one in parameters),
    )
