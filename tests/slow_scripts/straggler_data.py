"""Slow because one rank's storage is slower than the others'."""

import time
from typing import Any

import torch
from ordinary import RANK, WIDTH, Training, options
from torch.utils.data import Dataset


class FromStorage(Dataset[Any]):
    """Samples that take so long to read."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if self._read_s:
            time.sleep(self._read_s)
        return torch.full((WIDTH,), number / 2048), number % 10


if __name__ == "__main__":
    told = options()
    slow = RANK == 1 and not told.mended
    Training(dataset=FromStorage(0.0003 if slow else 0.0)).run(told.steps)
