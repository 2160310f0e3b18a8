"""Slow because each sample comes from a slow storage, and nobody reads ahead."""

import time
from typing import Any

import torch
from ordinary import WIDTH, Training, options
from torch.utils.data import Dataset


class FromFarAway(Dataset[Any]):
    """Samples from a storage that takes its time for each of them."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0004)
        return torch.full((WIDTH,), number / 2048), number % 10


if __name__ == "__main__":
    told = options()
    Training(dataset=FromFarAway(), workers=(told.value or 4) if told.mended else 0).run(told.steps)
