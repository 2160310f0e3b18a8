"""Train with less memory: recompute, attention without the score matrix, no stored graphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class CheckpointedStack(nn.Module):
    """Sequential layers of which only every N-th boundary is stored for backward."""

    def __init__(self, layers: Sequence[nn.Module], every: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.every = every

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Run ``every`` layers at a time under ``checkpoint``; the last part may be shorter."""
        # solution
        for begin in range(0, len(self.layers), self.every):
            part = nn.Sequential(*self.layers[begin : begin + self.every])
            value = checkpoint(part, value, use_reentrant=False)
        return value
        # end of solution


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Return softmax(Q K^T / sqrt(d)) V without creating the full score matrix.

    ``causal``: a position attends to itself and earlier positions. Tensors are batch x heads x
    length x d.
    """
    # solution
    return nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
    # end of solution


def train_frugally(
    layers: Sequence[nn.Module],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batch: int,
) -> list[float]:
    """Run one step per batch, in parts of ``micro_batch`` samples; return each batch's mean loss.

    The last part may be smaller, and is weighted by its number of samples. Each layer is checkpointed
    (``CheckpointedStack``), and runs in bfloat16 under autocast.
    """
    # solution
    model = CheckpointedStack(layers, every=1)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        total = 0.0
        parts = zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)
        for part, expected in parts:
            with torch.autocast(part.device.type, dtype=torch.bfloat16):
                loss = criterion(model(part), expected) * (len(part) / len(inputs))
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses
    # end of solution


def validate_frugally(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], criterion: nn.Module
) -> float:
    """Return the mean loss over all samples, without storing activations."""
    # solution
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in batches:
            total += criterion(model(inputs), targets).item() * len(inputs)
            count += len(inputs)
    return total / count
    # end of solution


class Cost(NamedTuple):
    """The cost of a step."""

    seconds: float
    peak_bytes: int


def best_frequency(costs: Mapping[int, Cost], budget_bytes: int) -> int | None:
    """Return the ``every`` with the fastest step that fits into the budget, None if none does."""
    # solution
    fitting = {every: cost for every, cost in costs.items() if cost.peak_bytes <= budget_bytes}
    return min(fitting, key=lambda every: fitting[every].seconds, default=None)
    # end of solution
