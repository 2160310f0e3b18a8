"""Trainings of several kinds for ``bench_scaling.py``: heavy in computing, in messages, in small operations."""

import torch
from torch import nn

from torchmuster.bench.probes.small_gpt import SmallGpt

_SAMPLES = 256


def wide_gpt() -> nn.Module:
    """Return a GPT of four wide blocks: 4 million parameters, more computing for each message."""
    return SmallGpt(width=256, blocks=4, heads=4)


def fat_layers() -> nn.Module:
    """Return layers of many weights and little computing: 8 million parameters, 32 MiB a step."""
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 900), nn.ReLU(), nn.Linear(900, 10)
    )


def vectors() -> list[tuple[torch.Tensor, int]]:
    """Return samples for it."""
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(1024, generator=drawn), number % 10) for number in range(_SAMPLES)]


def pictures_model() -> nn.Module:
    """Return a small convolutional network: few parameters, much computing."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def pictures() -> list[tuple[torch.Tensor, int]]:
    """Return samples for it."""
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 64, 64, generator=drawn), number % 10) for number in range(_SAMPLES)]
