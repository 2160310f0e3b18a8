"""Optimizers and learning-rate schedules by the names used in settings."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torchmuster.errors import Impossible

Name = Literal["adamw", "sgd"]
ParameterGroup: TypeAlias = dict[str, Any]  # as torch's optimizers take it: params, and options
MakeOptimizer: TypeAlias = Callable[
    [list[nn.Parameter] | list[ParameterGroup]], torch.optim.Optimizer
]
Shape = Literal["constant", "linear", "cosine", "warmup_stable_decay"]


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> list[ParameterGroup]:
    """Return the trained parameters of a model as groups with ``lr`` and ``weight_decay``.

    The last group has a weight decay of 0: all parameters with fewer than two dimensions, which are
    biases and the scales of norms. The groups do not depend on the strategy.
    """
    decayed: ParameterGroup = {"params": [], "weight_decay": weight_decay, "lr": learning_rate}
    undecayed: ParameterGroup = {"params": [], "weight_decay": 0.0, "lr": learning_rate}
    for parameter in model.parameters():
        if parameter.requires_grad:
            group = undecayed if parameter.ndim < 2 else decayed
            group["params"].append(parameter)
    return [group for group in (decayed, undecayed) if group["params"]]


def optimizer_named(
    name: Name,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
) -> MakeOptimizer:
    """Return a function that creates the optimizer from parameters, or from :func:`parameter_groups`.

    adamw is torch's fused one, which reads from the device whether to apply a step: see
    :class:`torchmuster.train.step.TrainStep`. With sgd, the host reads it in every step: torch's
    fused SGD cannot do that in its first step, nor for shards.
    """
    common: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, momentum=momentum, **common)

    return lambda parameters: torch.optim.AdamW(
        parameters, betas=betas, eps=eps, fused=True, **common
    )


def schedule_factor(
    step: int,
    shape: Shape,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_factor: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Return the learning-rate factor of a step, counted from 0.

    The factors are those of transformers' schedule of this name, but the warm-up is one step
    earlier: its last step has the full rate, and no step has the rate 0, which would have no
    effect. ``min_factor`` is the end of a decay, and ``decay_steps`` the length of
    warmup_stable_decay's decay.
    """
    if step < warmup_steps:
        factor = (step + 1) / warmup_steps
        if shape == "warmup_stable_decay":
            factor = factor * (1.0 - min_factor) + min_factor
        return factor
    if total_steps is None or shape == "constant":
        return 1.0
    begin = warmup_steps
    if shape == "warmup_stable_decay" and decay_steps is not None:
        begin = max(total_steps - decay_steps, warmup_steps)
    done = min(max(step - begin, 0) / max(total_steps - begin, 1), 1.0)
    if shape == "linear":
        return (1.0 - done) * (1.0 - min_factor) + min_factor
    factor = 0.5 * (1.0 + math.cos(math.pi * done))
    return factor * (1.0 - min_factor) + min_factor


def schedule(
    optimizer: torch.optim.Optimizer,
    shape: Shape = "constant",
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_learning_rate: float = 0.0,
    decay_steps: int | None = None,
) -> LambdaLR:
    """Return torch's LambdaLR for a curve; ``total_steps`` counts optimizer steps of the whole run.

    The names are transformers'; :func:`schedule_factor` describes the options.
    """
    if total_steps is None and shape != "constant":
        raise Impossible(
            f"the schedule {shape!r} needs the number of steps, which is not known here",
            why="the length of a stream is known only at its end, and the decay ends with it",
            fix="set the number of steps, or use the schedule 'constant'",
        )
    if total_steps is not None and warmup_steps + (decay_steps or 0) > total_steps:
        raise Impossible(
            f"a warm-up of {warmup_steps} steps and a decay of {decay_steps or 0} do not fit in "
            f"{total_steps} steps",
            fix="use fewer warm-up steps, or more steps",
        )
    group = optimizer.param_groups[0]
    peak = float(group.get("initial_lr", group["lr"]))
    # A plain function is not in the state dict, so a resumed run may change the curve.
    return LambdaLR(
        optimizer,
        lambda step: schedule_factor(
            step,
            shape,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_factor=min_learning_rate / peak,
            decay_steps=decay_steps,
        ),
    )
