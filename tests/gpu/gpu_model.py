"""The model and data that the GPU tests train: found by name through PYTHONPATH."""

import torch
from torch import nn

VOCABULARY = 512
LENGTH = 128


class Gpt(nn.Module):
    """A causal language model with a list of equal blocks."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        layers = []
        for _ in range(blocks):
            layers.append(
                nn.TransformerEncoderLayer(
                    width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
                )
            )
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits of the shape (texts, tokens, vocabulary)."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            input_ids.shape[1], device=input_ids.device
        )
        states = self.tokens(input_ids)
        for block in self.blocks:
            states = block(states, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(states)
        return logits


def make_model() -> nn.Module:
    """Return 26 million parameters: large compared with what an allocator rounds up."""
    return Gpt(width=512, blocks=8)


def make_rows() -> list[dict[str, torch.Tensor]]:
    """Return texts that count upwards from a random number, so that the loss falls."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(VOCABULARY, (512, 1), generator=generator)
    texts = (first + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": text, "labels": text} for text in texts]
