"""Logits of a model for a fixed batch, to compare a merged model with its parts."""

from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.model_class import IMAGE_CLASSIFICATION, ModelClass

_TOKENS = 16
_IMAGE_SIZE = 224  # if a config does not say


def fixed_batch(config: Any, kind: ModelClass) -> dict[str, torch.Tensor]:
    """Return one sample from a fixed seed: token ids, or pixel values for an image classifier."""
    generator = torch.Generator().manual_seed(0)
    if kind is IMAGE_CLASSIFICATION:
        size = getattr(config, "image_size", None) or _IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.rand((1, channels, height, width), generator=generator)}
    text = config.get_text_config()
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    return {"input_ids": torch.randint(text.vocab_size, (1, length), generator=generator)}


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute a model's logits on the CPU, in eval mode."""
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits.float()


def largest_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected logit; NaN if one is NaN."""
    if logits.shape != expected.shape:
        return float("inf")
    difference, largest = (logits - expected).abs().max(), expected.abs().max()
    return float(difference / largest) if largest > 0 else float(difference)
