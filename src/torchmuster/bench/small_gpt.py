"""A small GPT and texts that it can learn: what the training benches train. Imports torch."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY = 2048
LENGTH = 128
HEADS = 4
USED_TOKENS = 64
RANDOM_SHARE = 0.1  # of the tokens; all others follow from the token before


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        heads = self.queries_keys_values(self.attention_norm(states)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        context = scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.projection(context.transpose(1, 2).flatten(2))
        result: torch.Tensor = states + self.mlp(states)
        return result


class SmallGpt(nn.Module):
    """A causal language model of about two million parameters.

    ``recompute_every`` N: the activations of every N-th block are computed again in the backward
    instead of kept (activation checkpointing). 0: of none.
    """

    def __init__(self, *, width: int = 128, blocks: int = 8) -> None:
        super().__init__()
        self.recompute_every = 0
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next tokens of texts of the shape (texts, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.tokens(tokens) + self.positions(positions)
        for number, block in enumerate(self.blocks):
            if self.recompute_every and number % self.recompute_every == 0:
                states = checkpoint(block, states, use_reentrant=False)
            else:
                states = block(states)
        logits = self.last(states[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def texts(batch_size: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield batches of texts, endlessly; each token mostly decides the next."""
    next_token = torch.randperm(USED_TOKENS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(USED_TOKENS, (batch_size, LENGTH), generator=generator)
        follows = torch.rand(batch_size, LENGTH, generator=generator) >= RANDOM_SHARE
        for position in range(1, LENGTH):
            expected = next_token[tokens[:, position - 1]]
            tokens[:, position] = torch.where(follows[:, position], expected, tokens[:, position])
        yield tokens
