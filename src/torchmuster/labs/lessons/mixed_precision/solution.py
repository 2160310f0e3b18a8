"""Train in 16 bits where it is safe, and find out where it is not."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


def train_step(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Run one step in mixed precision and return its loss.

    Forward and loss under autocast, backward outside; the weights stay in 32 bits.
    """
    # solution
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype=dtype):
        loss = criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return float(loss)
    # end of solution


def scaled_step(
    loss: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    max_norm: float,
) -> None:
    """Run one step with a scaled loss (for fp16) and gradients clipped to ``max_norm``."""
    # solution
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    # end of solution


def train_in_fp16(
    model: nn.Module,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> list[int]:
    """Train in float16, one step for each batch, gradients clipped to 1.0; return the skipped steps.

    With a scale that is too large, the gradients overflow: the scaler skips that step (numbers from 0) and halves its
    scale.
    """
    # solution
    skipped = []
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = criterion(model(inputs), targets)
        scale = scaler.get_scale()
        scaled_step(loss, model, optimizer, scaler, max_norm=1.0)
        if scaler.get_scale() < scale:
            skipped.append(number)
    return skipped
    # end of solution


def first_bad_layer(model: nn.Module, inputs: torch.Tensor) -> str | None:
    """Return the name of the first layer whose output is not finite (NaN or infinite), or None.

    Layers are the modules without children, in call order. The model stays unchanged.
    """
    # solution
    bad: list[str] = []

    def watch(name: str) -> Any:
        def check(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if not torch.isfinite(output).all():
                bad.append(name)

        return check

    hooks = []
    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(watch(name)))
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return bad[0] if bad else None
    # end of solution


class Result(NamedTuple):
    """The result of a training run in one precision."""

    seconds: float
    loss: float


def choose_precision(results: Mapping[str, Result]) -> str:
    """Return the fastest precision whose loss is within 1 % of the "fp32" loss."""
    # solution
    reference = results["fp32"].loss

    def is_good(result: Result) -> bool:
        gap = abs(result.loss - reference) / abs(reference)
        return math.isfinite(gap) and gap <= 0.01

    good = {name: result for name, result in results.items() if is_good(result)}
    return min(good, key=lambda name: good[name].seconds)
    # end of solution
