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

from torchmuster.errors import Impossible
from torchmuster.train.data.pytree import tensors_in

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]]

IGNORED = -100  # a label that is not counted; torch and transformers agree on this number
# Larger logits are converted to float32 in chunks, and again in the backward: a full copy of a
# large vocabulary's logits can take more memory than the model.
_WHOLE_ELEMENTS = 2**24


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of ``(inputs, targets)`` over the samples."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise Impossible(
            "the loss cross_entropy needs batches of (inputs, targets), but this batch is "
            f"{_kind_of(batch)}",
            why="its dataset must return pairs: (input, class)",
            fix="return pairs from the dataset, or set your own loss (model.loss: module:function)",
        )
    inputs, targets = batch
    return F.cross_entropy(_logits(model(inputs)).float(), targets)


def language_model(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed next-token cross entropy, and the number of tokens in the sum.

    A batch holds ``input_ids`` and optionally ``labels`` (the same ids at the same positions, -100
    for tokens to ignore), ``attention_mask`` and ``position_ids``.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise Impossible(
            "the loss language_model needs batches with input_ids, but this batch is "
            f"{_kind_of(batch)}",
            why="its dataset must return dictionaries: {'input_ids': …, 'labels': …}",
            fix="return such dictionaries, or set another loss (model.loss: cross_entropy or "
            "module:function)",
        )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = _logits(model(**inputs))
    # Shift the labels and not the logits, which then need no copy.
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    targets[:, :-1] = _labels(batch)[:, 1:]
    count = (targets != IGNORED).sum()
    return _summed(logits.flatten(0, 1), targets.flatten()), count


def masked_language_model(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy of the masked tokens, and their number.

    A batch holds ``input_ids`` with masked tokens and ``labels``: the original id at each masked
    position, and -100 at all others.
    """
    inputs, labels = _with_labels(batch, "masked_language_model")
    logits = _logits(model(**inputs))
    count = (labels != IGNORED).sum()
    return _summed(logits.flatten(0, 1), labels.flatten()), count


def classification(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy over the samples of dictionaries with ``labels``.

    The other entries are the model's inputs: ``pixel_values``, or ``input_ids`` and
    ``attention_mask``. This is the loss of transformers for single-label classification.
    """
    inputs, labels = _with_labels(batch, "classification")
    return F.cross_entropy(_logits(model(**inputs)).float(), labels)


def _with_labels(batch: Any, loss: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise Impossible(
            f"the loss {loss} needs batches with labels, but this batch is {_kind_of(batch)}",
            why="its dataset must return dictionaries: {'labels': …, and the inputs of the model}",
            fix="return such dictionaries, or set another loss (model.loss: module:function)",
        )
    return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]


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
        "masked_language_model": masked_language_model,
        "classification": classification,
    }
    return known.get(name)


def _labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if "labels" in batch:
        return batch["labels"]
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = max(1, _WHOLE_ELEMENTS // logits.shape[-1])
    if len(logits) <= rows:
        return _sum_of_part(logits, targets)
    parts = zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    sums = [checkpoint(_sum_of_part, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum()


def _sum_of_part(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def _logits(output: Any) -> torch.Tensor:
    """Return the logits from a model's output."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise Impossible(
            f"the model returned {_kind_of(output)}, but the loss needs logits",
            why="the output must be a tensor of logits, or have a field 'logits'",
            fix="return logits from the model, or set your own loss (model.loss: module:function)",
        )
    return logits


def _kind_of(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
