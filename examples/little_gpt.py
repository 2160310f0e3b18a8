"""A small GPT over bytes, and text to train it on: the source of these examples."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

BYTES = 256


class Block(nn.Module):
    """Attention to what came before, then a small network for each place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Return what each place has become."""
        parts = self.queries_keys_values(self.norm_before_attention(places)).chunk(3, dim=-1)
        by_head = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        seen = scaled_dot_product_attention(*by_head, is_causal=True)
        places = places + self.attended(seen.transpose(1, 2).flatten(2))
        return places + self.feed_forward(places)


class LittleGpt(nn.Module):
    """Says for each place of a text how likely each sign (a byte, unless told otherwise) is as the next."""

    def __init__(
        self, *, length: int, signs: int = BYTES, width: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.signs = nn.Embedding(signs, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, signs))

    def read(self, text: torch.Tensor) -> torch.Tensor:
        """Return what each place has become after all blocks."""
        places = torch.arange(text.shape[1], device=text.device)
        read: torch.Tensor = self.blocks(self.signs(text) + self.places(places))
        return read

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits of the shape (texts, places, signs)."""
        logits: torch.Tensor = self.last(self.read(text))
        return logits


def next_byte_loss(model: nn.Module, text: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the summed loss over all next bytes, and how many they are."""
    logits, targets = model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
    return cross_entropy(logits.float(), targets, reduction="sum"), targets.numel()


def measure(model: nn.Module, text: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
    """Measure the loss for an evaluation."""
    return {"loss": next_byte_loss(model, text)}


def pieces_of_text(length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Cut the source of these examples into pieces of so many bytes: to train on, and to test with."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sources)))
    pieces = list(text.unfold(0, length + 1, length))  # with one byte more, to be foretold
    return [one for place, one in enumerate(pieces) if place % 10], pieces[::10]
