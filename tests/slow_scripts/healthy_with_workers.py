"""A training with nothing to mend: samples that take time to read, and workers that read them beforehand."""

import time
from typing import Any

import torch
from ordinary import WIDTH, Training, options
from torch.utils.data import Dataset


class FromFarAway(Dataset[Any]):
    """Samples from a storage that takes a millisecond for each."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0002)
        return torch.full((WIDTH,), number / 2048), number % 10


if __name__ == "__main__":
    Training(dataset=FromFarAway(), workers=2).run(options().steps)
