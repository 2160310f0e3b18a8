"""Slow because the loop takes the weights of every step out of the device to keep them as numbers."""

import torch
from ordinary import Training, options
from torch import nn

HISTORY: list[list[float]] = []


def keep(_: int, model: nn.Module, logits: torch.Tensor) -> None:
    """Keep what the model said, and its weights."""
    HISTORY.append(logits.flatten().tolist())
    for weight in model.parameters():
        HISTORY.append(weight.flatten().tolist())
    HISTORY.clear()


if __name__ == "__main__":
    told = options()
    Training(after_step=(lambda *_: None) if told.mended else keep).run(told.steps)
