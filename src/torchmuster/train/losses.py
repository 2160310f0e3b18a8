"""The usual losses: a function of the model and a batch that returns what is to be made small.

A loss is either the mean over the samples of a micro-batch, or ``(total, count)``: a sum over items
such as tokens, and how many they are. :class:`torchmuster.train.step.TrainStep` weighs either one so
that the step is that of the whole batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from torch.utils.checkpoint import checkpoint

from torchmuster.errors import Impossible
from torchmuster.train.data.pytree import tensors_in

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]]

IGNORED = -100  # a label that is not counted; torch and transformers agree on this number
# Logits of more elements are made float32 in parts, and again in the backward: a whole copy of a
# large vocabulary's logits can take more memory than the model.
_WHOLE_ELEMENTS = 2**24


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of ``(inputs, targets)`` over the samples."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise Impossible(
            f"the loss cross_entropy takes batches of (inputs, targets); this one is {_losses_kind(batch)}",
            why="a dataset for it gives pairs: (input, class)",
            fix="return pairs from the dataset, or give a loss of your own: module:function",
        )
    inputs, targets = batch
    logits = _logits(model(inputs)).float()
    try:
        return F.cross_entropy(logits, targets)
    except (IndexError, RuntimeError, ValueError) as error:  # on a GPU, ranges end in an assertion
        if isinstance(targets, torch.Tensor):
            _refuse_labels(logits, targets, error)
        raise


def language_model(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy of each next token, and of how many tokens it is the sum.

    A batch holds ``input_ids`` and, if it likes, ``labels`` (the same ids at the same places, -100 where
    a token is not to be learnt), ``attention_mask`` and ``position_ids``.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise Impossible(
            f"the loss language_model takes batches with input_ids; this one is {_losses_kind(batch)}",
            why="a dataset for it gives dictionaries: {'input_ids': …, 'labels': …}",
            fix="return such dictionaries, or give another loss: cross_entropy or module:function",
        )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = _logits(model(**inputs))
    # The labels are shifted and not the logits: those need not be copied.
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    targets[:, :-1] = _labels(batch)[:, 1:]
    count = (targets != IGNORED).sum()
    return _summed(logits.flatten(0, 1), targets.flatten()), count


def measured_loss(
    loss: Loss,
) -> Callable[[nn.Module, Any], dict[str, tuple[torch.Tensor, torch.Tensor | int]]]:
    """Return a loss as what :func:`torchmuster.train.evaluate.evaluate` adds up over all ranks."""

    def measure(model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor | int]]:
        result = loss(model, batch)
        if isinstance(result, tuple):
            return {"loss": result}
        samples = len(next(tensors_in(batch)))
        return {"loss": (result * samples, samples)}

    return measure


def loss_named(name: str) -> Loss | None:
    """Return one of these losses by its name; None if it has none."""
    known: dict[str, Loss] = {"cross_entropy": cross_entropy, "language_model": language_model}
    return known.get(name)


def _refuse_labels(logits: torch.Tensor, targets: torch.Tensor, error: Exception) -> None:
    """Say what is wrong with labels, if it is they; looked at only where torch has refused them."""
    classes = logits.shape[1] if logits.ndim > 1 else len(logits)
    kind = str(targets.dtype).removeprefix("torch.")
    if targets.shape != logits.shape and targets.dtype not in (torch.int64, torch.uint8):
        raise Impossible(
            f"the labels of a batch are {kind}, and the loss cross_entropy takes int64",
            why=f"a label is the number of one of the model's {classes} classes",
            fix="give labels.long(), or a loss of your own: model.loss, module:function",
        ) from error
    counted = targets[targets != IGNORED]
    if targets.is_floating_point() or not counted.numel():
        return
    lowest, highest = int(counted.min()), int(counted.max())
    if lowest < 0 or highest >= classes:
        raise Impossible(
            f"the labels of a batch go from {lowest} to {highest} ({kind}), but the model has "
            f"{classes} classes, 0 to {classes - 1}",
            why="a label is the number of a class",
            fix="let the model's last layer have more outputs, or check the labels",
        ) from error


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
    """Take what a model returns: logits, or something that has them."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise Impossible(
            f"the model returned {_losses_kind(output)}, and the loss needs logits",
            why="logits are a tensor, or the field 'logits' of what is returned",
            fix="return them from the model, or give a loss of your own: module:function",
        )
    return logits


def _losses_kind(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
