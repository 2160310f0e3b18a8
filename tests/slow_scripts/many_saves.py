"""Slow because the weights are saved after every step."""

import tempfile
from pathlib import Path

import torch
from ordinary import RANK, Training, options
from torch import nn

if __name__ == "__main__":
    told = options()
    every = 1000 if told.mended else 1
    with tempfile.TemporaryDirectory() as folder:

        def save(step: int, model: nn.Module, _: torch.Tensor) -> None:
            """Keep the weights, on the first rank."""
            if RANK == 0 and step % every == 0:
                torch.save(model.state_dict(), Path(folder) / "weights.pt")

        Training(after_step=save).run(told.steps)
