"""Pictures of four shapes, drawn here so that nothing is downloaded, and a network that tells them apart."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

SIDE = 16  # pixels
NAMES = ("disc", "square", "diamond", "cross")


def draw(count: int, *, seed: int) -> TensorDataset:
    """Draw so many noisy pictures of shapes, each at a place and of a size of its own."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(len(NAMES), (count,), generator=random)
    centres = 5 + torch.rand(2, count, 1, 1, generator=random) * (SIDE - 10)
    radius = 3.5 + 2 * torch.rand(count, 1, 1, generator=random)
    axis = torch.arange(SIDE, dtype=torch.float32)
    x = (axis.view(1, 1, -1) - centres[0]).abs()
    y = (axis.view(1, -1, 1) - centres[1]).abs()
    each = torch.stack(
        [
            x**2 + y**2 < radius**2,
            torch.maximum(x, y) < radius,
            x + y < radius,
            (torch.minimum(x, y) < radius / 3) & (torch.maximum(x, y) < radius),
        ]
    )
    pictures = each[kinds, torch.arange(count)].unsqueeze(1).float()
    noise = 0.1 * torch.randn(pictures.shape, generator=random)
    return TensorDataset(pictures + noise, kinds)


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),  # a shape is the same wherever it is
        nn.Flatten(),
        nn.Linear(32, len(NAMES)),
    )
