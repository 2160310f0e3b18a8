"""Tensors inside nested batches: tuples, lists, mappings, objects with ``to``."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with ``change`` applied to each tensor, and to each object with ``to``.

    Examples are BatchEncoding, PackedSequence and graphs. Everything else is unchanged;
    mappings become plain dictionaries.
    """
    if isinstance(batch, torch.Tensor) or hasattr(batch, "to"):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(part, change) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(part, change) for part in batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    return batch


def move_to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Return the batch on a device; the copy from pinned memory may still run when this returns.

    ``pin`` copies a batch to pinned memory first: a copy from other memory waits for the device.
    """

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if pin and part.device.type == "cpu":
                part = part.pin_memory()
            return part.to(device, non_blocking=True)
        return part.to(device)

    return map_tensors(batch, move)


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a batch with its name, such as ``batch['pixels'][0]``, in order.

    A function that refers to itself in a closure would keep the tensors of every batch alive until
    the garbage collector runs.
    """
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from named_tensors(value, f"{name}[{number}]")


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor of a batch, in order."""
    for _, tensor in named_tensors(batch):
        yield tensor
