"""Slow because the weights are saved after every step, to a storage behind a network."""

import io
import time

import torch
from ordinary import RANK, Training, options
from torch import nn

_BYTES_PER_S = 150e6


class FarFile(io.BytesIO):
    """A file whose bytes take their time to get there."""

    def write(self, data: object) -> int:
        written = super().write(data)  # type: ignore[arg-type]
        time.sleep(written / _BYTES_PER_S)
        return written


if __name__ == "__main__":
    told = options()
    every = 1000 if told.mended else 1

    def save(step: int, model: nn.Module, _: torch.Tensor) -> None:
        """Keep the weights, on the first rank."""
        if RANK == 0 and (step + 1) % every == 0:
            torch.save(model.state_dict(), FarFile())

    Training(after_step=save).run(told.steps)
