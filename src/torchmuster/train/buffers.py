"""Tensors that no optimizer trains, such as BatchNorm's running means: all ranks use rank 0's."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.train import seeds
from torchmuster.train.models.parameters import peft_config
from torchmuster.train.world import World


def untrained(model: nn.Module) -> list[torch.Tensor]:
    """Return tensors that a forward or a loss may change: buffers and frozen parameters.

    Frozen parameters of a model with LoRA are excluded: they are all its weights, and nothing
    changes them.
    """
    if peft_config(model) is not None:
        return list(model.buffers())
    return [
        *model.buffers(),
        *(parameter for parameter in model.parameters() if not parameter.requires_grad),
    ]


@contextmanager
def no_effect(model: nn.Module, world: World) -> Iterator[None]:
    """Restore untrained tensors and random states afterwards, and clear the gradients."""
    before = [(tensor, tensor.detach().clone()) for tensor in untrained(model)]
    states = seeds.save_random_states(world)
    try:
        yield
    finally:
        seeds.load_random_states(states, world)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)


def share(buffers: Iterable[torch.Tensor], world: World) -> None:
    """Broadcast rank 0's values of some buffers to all ranks, in one message, as DDP does before each forward."""
    filled = [buffer for buffer in buffers if buffer.numel()]
    if world.world_size == 1 or not filled:
        return
    with torch.no_grad():
        values = [buffer.detach().to(world.device).contiguous() for buffer in filled]
        as_bytes = [
            buffer.view(-1).view(torch.uint8) for buffer in values
        ]  # gloo lacks some dtypes
        together = torch.cat(as_bytes)
        dist.broadcast(together, src=0)
        for buffer, value, own, heard in zip(
            filled,
            values,
            as_bytes,
            torch.split(together, [len(tensor) for tensor in as_bytes]),
            strict=True,
        ):
            own.copy_(heard)
            buffer.copy_(value)
