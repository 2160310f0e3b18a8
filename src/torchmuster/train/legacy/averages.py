"""Averages over ranks by hand: of a value, and of all gradients as DDP does it."""

from collections import defaultdict
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.errors import Impossible
from torchmuster.train.agreement import most_exact_type, totals
from torchmuster.train.legacy.presence import present_world

Value = TypeVar("Value", float, torch.Tensor)


def reduce_mean(value: Value, world_size: int | None = None) -> Value:
    """Return the mean of a number or tensor over all ranks; the given one is left as it is.

    Sums are taken in double precision. A floating tensor keeps its type and device; a tensor of whole
    numbers gives torch's default floating type. Without a group it is the value itself. It is the mean
    over *ranks*: where ranks hold means over different numbers of samples, reduce the sums and the
    counts instead, and divide.
    """
    world = present_world(world_size=world_size)
    if not isinstance(value, torch.Tensor):
        return totals([value], world)[0] / world.world_size
    kept = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    if world.world_size == 1:
        return value.detach().to(kept, copy=True)
    mean = value.detach().to(world.device, most_exact_type(world.device), copy=True)
    dist.all_reduce(mean)
    return (mean / world.world_size).to(value.device, kept)


def sync_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks: what DDP does, but after the backward.

    For a model that is not wrapped, and for seeing what DDP does: gradients of one type travel together
    in one all-reduce. A parameter that has a gradient on some ranks only counts as 0 on the others.
    """
    world = present_world()
    parameters = [one for one in model.parameters() if one.requires_grad]
    if any(isinstance(one, DTensor) for one in parameters):
        raise Impossible(
            "the gradients of this model cannot be averaged by sync_gradients: they are sharded",
            why="each rank holds a different part; FSDP has averaged them in the backward already",
            fix="leave the call out",
        )
    if world.world_size == 1:
        return
    holders = totals([float(one.grad is not None) for one in parameters], world)
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for parameter, ranks in zip(parameters, holders, strict=True):
        if ranks == 0:
            continue  # unused everywhere: an optimiser must not see it
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        alike[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
    for gradients in alike.values():
        together = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(together)
        together /= world.world_size
        parts = torch.split(together, [one.numel() for one in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))
