"""A small GPT: the default model of the benches."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY = 2048
LENGTH = 128
_WIDTH, _BLOCKS, _HEADS = 128, 8, 4


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        parts = self.queries_keys_values(self.before_attention(places)).chunk(3, dim=-1)
        query, key, value = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        places = places + self.attended(seen.transpose(1, 2).flatten(2))
        result: torch.Tensor = places + self.feed_forward(places)
        return result


class SmallGpt(nn.Module):
    """A causal language model."""

    def __init__(self, *, width: int = _WIDTH, blocks: int = _BLOCKS, heads: int = _HEADS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits of the shape (texts, places, tokens)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.tokens(input_ids) + self.places(places)
        for block in self.blocks:
            states = block(states)
        logits: torch.Tensor = self.last(states)
        return logits


def make_small_gpt() -> nn.Module:
    """Return the model; about two million parameters."""
    return SmallGpt()


_ROWS = 512
_TOKENS = 64
_RANDOM_SHARE = 0.1


def make_learnable_rows() -> list[dict[str, torch.Tensor]]:
    """Return the rows; each token mostly decides the next."""
    maker = torch.Generator().manual_seed(0)
    next_token = torch.randperm(_TOKENS, generator=maker)
    tokens = torch.randint(_TOKENS, (_ROWS, LENGTH), generator=maker)
    by_rule = torch.rand(_ROWS, LENGTH, generator=maker) >= _RANDOM_SHARE
    for place in range(1, LENGTH):
        follows = next_token[tokens[:, place - 1]]
        tokens[:, place] = torch.where(by_rule[:, place], follows, tokens[:, place])
    return [{"input_ids": row, "labels": row} for row in tokens]
