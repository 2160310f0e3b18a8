"""Optimizers and learning-rate schedules by the names used in settings."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torchmuster.errors import Impossible

Name = Literal["adamw", "sgd"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def optimizer_named(name: Name, *, learning_rate: float, weight_decay: float) -> MakeOptimizer:
    """Return a function that creates the optimizer from parameters; sgd has a momentum of 0.9.

    adamw is torch's fused one, which reads from the device whether to apply a step: see
    :class:`torchmuster.train.step.TrainStep`. torch's fused SGD cannot do that in its first step, nor for shards.
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


Shape = Literal["constant", "linear", "cosine"]

_AFTER_WARM_UP: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def schedule_factor(
    step: int, shape: Shape, *, warmup_steps: int = 0, total_steps: int | None = None
) -> float:
    """Return the learning-rate factor of a step, counted from 0.

    The warm-up's last step has the full rate; no step has the rate 0, which would have no effect.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if total_steps is None:
        return _AFTER_WARM_UP[shape](0.0)
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return _AFTER_WARM_UP[shape](min(done, 1.0))


def schedule(
    optimizer: torch.optim.Optimizer,
    shape: Shape = "constant",
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
) -> LambdaLR:
    """Return torch's LambdaLR for a curve; ``total_steps`` counts optimizer steps of the whole run."""
    if shape not in _AFTER_WARM_UP:
        raise Impossible(
            f"unknown schedule {shape!r}", fix=f"use one of {', '.join(get_args(Shape))}"
        )
    if total_steps is None and shape != "constant":
        raise Impossible(
            f"the schedule {shape!r} needs the number of steps, which is not known here",
            why="the length of a stream is known only at its end, and without the length only a "
            "constant learning rate is possible",
            fix="set the number of steps, or use the schedule 'constant'",
        )
    if total_steps is not None and warmup_steps > total_steps:
        raise Impossible(
            f"a warm-up of {warmup_steps} steps does not fit in {total_steps} steps",
            fix="use fewer warm-up steps, or more steps",
        )
    # A plain function is not in the state dict, so a resumed run may change the curve.
    return LambdaLR(
        optimizer,
        lambda step: schedule_factor(
            step, shape, warmup_steps=warmup_steps, total_steps=total_steps
        ),
    )
