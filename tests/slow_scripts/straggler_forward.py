"""Slow because one rank takes longer for its forward: a device that holds back, or inputs that are larger."""

import time

import torch
from ordinary import RANK, Training, network, options
from torch import nn


class HeldBack(nn.Module):
    """A network on a device that is slower than the others."""

    def __init__(self, behind_s: float) -> None:
        super().__init__()
        self.inner = network()
        self._behind_s = behind_s

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self._behind_s)
        logits: torch.Tensor = self.inner(batch)
        return logits


if __name__ == "__main__":
    told = options()
    Training(model=HeldBack(0.08 if RANK == 1 and not told.mended else 0.0)).run(told.steps)
