"""A vision transformer of the large kind, and pictures for it: a model that has no tokens."""

import torch
from torch import nn
from torch.utils.data import Dataset

_SIDE, _PATCH, _WIDTH, _BLOCKS, _CLASSES = 224, 16, 1024, 24, 1000


class Vision(nn.Module):
    """Patches of a picture, attended to by blocks that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.places = nn.Parameter(torch.zeros(1, (_SIDE // _PATCH) ** 2, _WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, 16, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(_BLOCKS)
        )
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        seen = self.patches(picture).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            seen = block(seen)
        scores: torch.Tensor = self.head(seen.mean(1))
        return scores


def model() -> nn.Module:
    """Return the model."""
    return Vision()


class _Pictures(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, _SIDE, _SIDE), number


def data() -> Dataset[tuple[torch.Tensor, int]]:
    """Return pictures."""
    return _Pictures()
