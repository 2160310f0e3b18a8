"""Slow because one rank takes longer for its backward, which under DDP looks equally long on all of them."""

import time
from typing import Any

import torch
from ordinary import RANK, Training, network, options
from torch import nn


class _SlowBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, behind_s: float) -> torch.Tensor:
        ctx.behind_s = behind_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.behind_s)
        return gradient, None


class HeldBack(nn.Module):
    """A network whose gradients take longer than those of others."""

    def __init__(self, behind_s: float) -> None:
        super().__init__()
        self.first, self.second = network(), nn.Linear(10, 10)
        self._behind_s = behind_s

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        slow: Any = _SlowBack
        logits: torch.Tensor = self.second(slow.apply(self.first(batch), self._behind_s))
        return logits


if __name__ == "__main__":
    told = options()
    Training(model=HeldBack(0.08 if RANK == 1 and not told.mended else 0.0)).run(told.steps)
