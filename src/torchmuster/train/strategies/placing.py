"""Getting a model's values to where they are computed with."""

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.train.models.deferred import is_deferred, materialise
from torchmuster.train.world import World


def place(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Move a model to a device; one without values gets them there."""
    if not is_deferred(model):
        return model.to(device)
    materialise(model, device=device, seed=seed)
    return model


def take_values_of_rank_0(model: nn.Module, world: World) -> None:
    """Give every rank the values of rank 0, as DDP does: else shards of different models make one."""
    if world.world_size == 1:
        return
    with torch.no_grad():
        for one in [*model.parameters(), *model.buffers()]:
            values = one.detach().to(world.device)
            dist.broadcast(values, src=0)
            one.copy_(values)
