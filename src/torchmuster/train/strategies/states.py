"""Values and states of a model on all ranks: sent from rank 0, saved and restored."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from torchmuster.errors import Impossible
from torchmuster.train.models.meta_init import is_on_meta
from torchmuster.train.models.parameters import frozen_names, own_name
from torchmuster.train.world import World


def take_values_of_rank_0(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's values, as DDP does: else shards of different models are mixed."""
    if world.world_size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = tensor.detach().to(world.device)
            dist.broadcast(values, src=0)
            tensor.copy_(values)


def whole_values(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Return rank 0's parameters and buffers by name; empty on the other ranks."""
    if not world.is_first:
        return {}
    if is_on_meta(model):
        raise without_values()
    return {own_name(name): values for name, values in model.state_dict().items()}


def take_shards_of_rank_0(
    model: nn.Module, whole: Mapping[str, torch.Tensor], world: World, *, home: torch.device
) -> None:
    """Fill a sharded meta-device model with rank 0's values (``whole``), one tensor at a time.

    Parameters get their memory on ``home``, buffers on the rank's device.
    """
    buffers = {name: buffer.to(world.device) for name, buffer in model.named_buffers()}
    model.to_empty(device=home)
    for name, buffer in buffers.items():  # tables that are not saved have their values already
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, buffer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(model, dict(whole), options=options)


def without_values() -> Impossible:
    """Return the error for a model that nobody has values of."""
    return Impossible(
        "the model is on the meta device and has no values",
        why="only rank 0 has values of a model that is built for sharding",
        fix="build it with its values, or with build_on_rank_0() and strategy fsdp",
    )


def training_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Return ``{"model": …, "optimizer": …}``; sharded tensors stay sharded."""
    states: dict[str, Any] = {"model": dcp.get_model_state_dict(model)}
    if optimizer is not None:
        states["optimizer"] = dcp.get_optimizer_state_dict(model, optimizer)
    return states


def load_training_state_dict(
    model: nn.Module, state: dict[str, Any], optimizer: torch.optim.Optimizer | None
) -> None:
    """Restore a state: sharded as the model is, or full on all ranks.

    A parameter that never had a gradient has no optimizer state, and gets none here. A state may
    lack frozen parameters, which then keep their values.
    """
    whole = not any(isinstance(tensor, DTensor) for tensor in state["model"].values())
    options = StateDictOptions(full_state_dict=whole, strict=not frozen_names(model))
    # Copies of the dictionaries, because torch removes names from its arguments.
    dcp.set_model_state_dict(model, dict(state["model"]), options=options)
    if optimizer is None:
        return
    own = dict(state["optimizer"])
    options.strict = False
    if not any(own["state"].values()):
        # plain SGD has no state; torch would look for its device
        options = StateDictOptions(strict=False)
    dcp.set_optimizer_state_dict(model, optimizer, own, options=options)
    _forget_all_but(own["state"], model, optimizer)


def _forget_all_but(
    names: Collection[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Remove states that torch has created for parameters without one: they count a step."""
    for name, parameter in model.named_parameters():
        if own_name(name) not in names:
            optimizer.state.pop(parameter, None)
