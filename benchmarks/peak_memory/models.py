"""The models of the memory benchmark: nine families, small enough for four ranks on two cores.

Each has a function that builds it without arguments and a dataset of one sample, as ``muster train`` takes them. Depths are
five to seven, so that what is extrapolated from three and four blocks is not what was traced.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import little_gpt as example

from peak_memory.families import SEQUENCE

_PICTURE = 64  # pixels
_PATCH = 8
_CLASSES = 1000


def bert() -> nn.Module:
    """Build a BERT that foretells masked words."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
    )
    return BertForMaskedLM(config).train()


def words() -> list[dict[str, torch.Tensor]]:
    """Return a row of words, all of them to be foretold."""
    row = torch.arange(SEQUENCE) % 8000
    return [{"input_ids": row, "labels": row}]


def vit() -> nn.Module:
    """Build a vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=_PICTURE,
        patch_size=_PATCH,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_labels=_CLASSES,
    )
    return ViTForImageClassification(config).train()


def pictures() -> list[tuple[torch.Tensor, int]]:
    """Return a picture and its class."""
    return [(torch.zeros(3, _PICTURE, _PICTURE), 3)]


def pictures_of_16_bits() -> list[tuple[torch.Tensor, int]]:
    """Return a picture for weights of 16 bits, and its class."""
    return [(picture.bfloat16(), kind) for picture, kind in pictures()]


def little_gpt() -> nn.Module:
    """Build the GPT of the examples, somewhat larger."""
    return example.LittleGpt(length=SEQUENCE, width=384, layers=6, heads=6)


def texts() -> list[torch.Tensor]:
    """Return a piece of text, with one byte more to be foretold."""
    return [torch.arange(SEQUENCE + 1) % example.BYTES]


next_byte_loss = example.next_byte_loss


class _Residual(nn.Module):
    """Two convolutions with batch normalization, around which the input goes too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the changed pictures."""
        return torch.relu(pictures + self.inner(pictures))


def residual() -> nn.Module:
    """Build a residual network of convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 192, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Sequential(*(_Residual(192) for _ in range(6))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(192, _CLASSES),
    )
