"""Slow because the loop takes the outputs of every step out of the device to keep them as numbers."""

import torch
from ordinary import Training, options
from torch import nn

HISTORY: list[list[list[float]]] = []


def keep(step: int, model: nn.Module, logits: torch.Tensor) -> None:
    """Keep what the model said, and how large its weights are."""
    HISTORY.append(logits.tolist())
    for weight in model.parameters():
        HISTORY.append([weight.flatten()[:60_000].tolist()])
    del HISTORY[:-8]


if __name__ == "__main__":
    told = options()
    Training(after_step=(lambda *_: None) if told.mended else keep).run(told.steps)
