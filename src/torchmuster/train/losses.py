"""Common losses: functions of the model and a batch that return the value to minimize.

A loss is either the mean over the samples of a micro-batch, or ``(total, count)``: a sum over items
such as tokens, and their number. :class:`torchmuster.train.step.TrainStep` weights both so
that the result equals one step on the whole batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the conventional name
from torch.utils.checkpoint import checkpoint

from torchmuster.train.data.pytree import tensors_in

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]]

IGNORED = -100  # a label that is not counted; torch and transformers agree on this number
# Larger logits are converted to float32 in chunks, and again in the backward: a full copy of a
# large vocabulary's logits can take more memory than the model.
_WHOLE_ELEMENTS = 2**24


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of ``(inputs, targets)`` over the samples."""
    inputs, targets = batch
    return F.cross_entropy(_logits(model(inputs)).float(), targets)


def language_model(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed next-token cross entropy, and the number of tokens in the sum.

    A batch holds ``input_ids`` and optionally ``labels`` (the same ids at the same positions, -100
    for tokens to ignore), ``attention_mask`` and ``position_ids``.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = _logits(model(**inputs))
    # Shift the labels and not the logits, which then need no copy.
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    targets[:, :-1] = _labels(batch)[:, 1:]
    return _summed(logits, targets)


def classification(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy of ``labels``, and their number without those that are -100.

    A label is the class of a sample, or the id of a masked token at its position. The other
    entries are the model's inputs: ``pixel_values``, or ``input_ids`` and ``attention_mask``.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return _summed(_logits(model(**inputs)), batch["labels"])


def measured_loss(
    loss: Loss,
) -> Callable[[nn.Module, Any], dict[str, tuple[torch.Tensor, torch.Tensor | int]]]:
    """Return a loss as a measure for :func:`torchmuster.train.evaluate.evaluate`."""

    def measure(model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor | int]]:
        result = loss(model, batch)
        if isinstance(result, tuple):
            return {"loss": result}
        samples = len(next(tensors_in(batch)))
        return {"loss": (result * samples, samples)}

    return measure


def loss_named(name: str) -> Loss | None:
    """Return one of these losses by its name; None for an unknown name."""
    known: dict[str, Loss] = {
        "cross_entropy": cross_entropy,
        "language_model": language_model,
        "classification": classification,
    }
    return known.get(name)


def _labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if "labels" in batch:
        return batch["labels"]
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over all targets that count, and their number."""
    logits, targets = logits.flatten(0, -2), targets.flatten()
    count = (targets != IGNORED).sum()
    rows = max(1, _WHOLE_ELEMENTS // logits.shape[-1])
    if len(logits) <= rows:
        return _sum_of_part(logits, targets), count
    parts = zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    sums = [checkpoint(_sum_of_part, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum(), count


def _sum_of_part(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def _logits(output: Any) -> torch.Tensor:
    """Return the logits from a model's output: its field ``logits``, or the output itself."""
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits
