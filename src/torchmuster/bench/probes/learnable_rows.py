"""Rows of tokens that follow a rule, mostly: something that a small model learns within a few steps."""

import torch

from torchmuster.bench.probes.small_gpt import LENGTH

_ROWS = 512
_TOKENS = 64
_RANDOM_SHARE = 0.1


def make() -> list[dict[str, torch.Tensor]]:
    """Return the rows; each token mostly decides the next."""
    maker = torch.Generator().manual_seed(0)
    next_token = torch.randperm(_TOKENS, generator=maker)
    tokens = torch.randint(_TOKENS, (_ROWS, LENGTH), generator=maker)
    by_rule = torch.rand(_ROWS, LENGTH, generator=maker) >= _RANDOM_SHARE
    for place in range(1, LENGTH):
        follows = next_token[tokens[:, place - 1]]
        tokens[:, place] = torch.where(by_rule[:, place], follows, tokens[:, place])
    return [{"input_ids": row, "labels": row} for row in tokens]
