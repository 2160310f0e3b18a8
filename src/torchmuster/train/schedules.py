"""How the learning rate goes: a warm-up, then constant, linear to zero, or half a cosine to zero.

It is a function of the number of optimiser steps alone: :class:`torchmuster.train.update.Update` steps it once for each, so
ranks and micro-batches do not change the curve. Steps that were skipped count: only the device knows which they are.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchmuster.errors import Impossible

Shape = Literal["constant", "linear", "cosine"]

_AFTER_WARM_UP: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def factor(
    step: int, shape: Shape, *, warmup_steps: int = 0, total_steps: int | None = None
) -> float:
    """Return what the learning rate is multiplied with in a step, counted from 0.

    The warm-up's last step has the whole rate; none has the rate 0, which would be a step for nothing.
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
    """Return torch's LambdaLR for a curve; ``total_steps`` counts optimiser steps of the whole run."""
    if shape not in _AFTER_WARM_UP:
        raise Impossible(
            f"the schedule {shape!r} is not known", fix=f"use one of {', '.join(get_args(Shape))}"
        )
    if total_steps is None and shape != "constant":
        raise Impossible(
            f"the schedule {shape!r} needs the number of steps, which is not known here",
            why="the data shows only at its end how long it is; without that only a constant rate is "
            "possible",
            fix="say how many steps to train, or use the schedule 'constant'",
        )
    if total_steps is not None and warmup_steps > total_steps:
        raise Impossible(
            f"a warm-up of {warmup_steps} steps does not fit in {total_steps} steps",
            fix="fewer warm-up steps, or more steps",
        )
    # A plain function is left out of the state dict, so a continued run may change the curve.
    return LambdaLR(
        optimizer,
        lambda step: factor(step, shape, warmup_steps=warmup_steps, total_steps=total_steps),
    )
