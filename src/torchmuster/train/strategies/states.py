"""States of models and optimisers under the model's own names, alike for every strategy.

torch's functions know DDP, FSDP2 and activation checkpointing, and take their prefixes out of the names.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from torchmuster.train.agreement import tell_all
from torchmuster.train.names import own_name
from torchmuster.train.world import World


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return ``{"model": …, "optimizer": …}``; sharded stays sharded."""
    states: dict[str, Any] = {"model": dcp.get_model_state_dict(model)}
    if optimizer is not None:
        states["optimizer"] = dcp.get_optimizer_state_dict(model, optimizer)
    return states


def load_state_dict(
    model: nn.Module, state: dict[str, Any], optimizer: torch.optim.Optimizer | None, world: World
) -> None:
    """Take a state back: sharded as the model is, whole on all ranks, or whole on rank 0 alone.

    A parameter that never had a gradient has no state of the optimiser's, and gets none here.
    """
    whole = not any(isinstance(one, DTensor) for one in state.get("model", {}).values())
    only_first = not all(tell_all("model" in state, world))
    options = StateDictOptions(full_state_dict=whole, broadcast_from_rank0=only_first)
    # Copies of the dictionaries, since torch takes names out of those that it is given.
    dcp.set_model_state_dict(model, dict(state.get("model", {})), options=options)
    if optimizer is not None:
        own = dict(state.get("optimizer", {}))
        kept = [one for of_one in own.get("state", {}).values() for one in of_one.values()]
        if not only_first and not any(isinstance(one, torch.Tensor) for one in kept):
            options = StateDictOptions()  # plain SGD keeps nothing; torch would look for its device
        options.strict = only_first
        dcp.set_optimizer_state_dict(model, optimizer, own, options=options)
        if not only_first:
            _forget_all_but(own.get("state", {}), model, optimizer)


def _forget_all_but(
    kept: Collection[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Take out what torch has made for parameters that had no state: it counts a step that never was."""
    for name, parameter in model.named_parameters():
        if own_name(name) not in kept:
            optimizer.state.pop(parameter, None)
