"""Getting a model's values to where they are computed with."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchmuster.errors import Impossible
from torchmuster.train.models.meta_init import is_on_meta, replace_parameters
from torchmuster.train.world import World


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device."""
    if is_on_meta(model):
        raise _without_values()
    return model.to(device)


def take_values_of_rank_0(model: nn.Module, world: World) -> None:
    """Give every rank the values of rank 0, as DDP does: else shards of different models make one."""
    if world.world_size == 1:
        return
    with torch.no_grad():
        for one in [*model.parameters(), *model.buffers()]:
            values = one.detach().to(world.device)
            dist.broadcast(values, src=0)
            one.copy_(values)


def whole_values(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Return rank 0's parameters and buffers by name; nothing on the other ranks."""
    if not world.is_first:
        return {}
    if is_on_meta(model):
        raise _without_values()
    return {name: one.detach() for name, one in (*model.named_parameters(), *model.named_buffers())}


def take_shards_of_rank_0(
    model: nn.Module, whole: Mapping[str, torch.Tensor], world: World, *, home: torch.device
) -> None:
    """Give a sharded model on the meta device its part of rank 0's values (``whole``), one tensor at a time.

    Parameters get their memory on ``home``, buffers on the rank's device.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def shard(parameter: nn.Parameter) -> torch.Tensor:
        assert isinstance(parameter, DTensor), "every parameter of a sharded model is one"
        values = _of_rank_0(whole.get(names[id(parameter)]), parameter, world)
        mesh, placements = parameter.device_mesh, parameter.placements
        part = distribute_tensor(values, mesh, placements).to_local()
        return DTensor.from_local(
            part.to(home),
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    replace_parameters(model, shard)
    model.to(home)  # FSDP notices by this that its shards are others
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full_name = f"{prefix}.{name}" if prefix else name
                values = _of_rank_0(whole.get(full_name), buffer, world)
                dist.broadcast(values, src=0)
                setattr(module, name, values)


def _of_rank_0(values: torch.Tensor | None, like: torch.Tensor, world: World) -> torch.Tensor:
    """Return rank 0's tensor on its device; elsewhere room for it."""
    if values is None:
        return torch.empty(like.shape, dtype=like.dtype, device=world.device)
    return values.to(world.device).contiguous()


def _without_values() -> Impossible:
    return Impossible(
        "the model is on the meta device, and nothing is known of its values",
        why="only rank 0 has values of a model that is built for sharding",
        fix="build it with its values, or with build_on_rank_0() and strategy fsdp",
    )
