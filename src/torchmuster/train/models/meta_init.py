"""Build a model for sharding: with values on rank 0, on the meta device on the other ranks.

::

    model = build_on_rank_0(build, world, seed=0)  # parameters on the meta device, except on rank 0
    model = Fsdp(world).prepare(model)             # shards them and sends each rank its part of rank 0's values

The values match ``torch.manual_seed(seed); build()`` in plain PyTorch, on any number of ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchmuster.train.seeds import preserved_random_states, seed_cpu
from torchmuster.train.world import World

Build = Callable[[], nn.Module]
_META = torch.device("meta")
_MADE = "torchmuster_on_meta"  # attribute of a parameter: its replacement on the meta device


def build_on_rank_0(
    build: Build, world: World, *, seed: int, sketch: nn.Module | None = None
) -> nn.Module:
    """Build a model with its values on rank 0, and without memory for its parameters elsewhere.

    ``sketch`` is the model of :func:`build_on_meta`, if there is one already. A rank whose model cannot be built
    on the meta device builds it whole.
    """
    if world.is_first:
        return build_whole(build, seed=seed)
    sketch = build_on_meta(build) if sketch is None else sketch
    return sketch if is_on_meta(sketch) else build_whole(build, seed=seed)


def build_for(
    strategy: str, build: Build, world: World, *, seed: int, sketch: nn.Module | None = None
) -> nn.Module:
    """Build a model for a strategy: with its values on rank 0 only if fsdp will shard it, else on every rank."""
    if strategy == "fsdp":
        return build_on_rank_0(build, world, seed=seed, sketch=sketch)
    return build_whole(build, seed=seed)


def build_whole(build: Build, *, seed: int) -> nn.Module:
    """Build a model with its values; the caller's random state is restored."""
    with preserved_random_states():
        seed_cpu(seed)
        return build()


def build_on_meta(build: Build) -> nn.Module:
    """Build a model without memory for its parameters; with memory if its code needs their values."""
    with preserved_random_states():
        seed_cpu(0)
        try:
            with _parameters_on_meta():
                return build()
        except (NotImplementedError, RuntimeError):  # torch raises these for data of a meta tensor
            return build()


def is_on_meta(model: nn.Module) -> bool:
    """Return whether any parameter of a model has no memory."""
    return any(parameter.is_meta for parameter in model.parameters())


def move_to_meta(model: nn.Module) -> None:
    """Release the memory of all parameters, in place; tied ones stay tied."""
    for module in model.modules():
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own:
            setattr(module, name, _on_meta(parameter))


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter without memory in place of another; for a tied one always the same."""
    if _MADE not in vars(parameter):
        made = nn.Parameter(parameter.detach().to(_META), requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # attributes that libraries set on it
        setattr(parameter, _MADE, made)
    return getattr(parameter, _MADE)  # type: ignore[no-any-return]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter on the meta device when a module registers it; buffers stay real."""

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None  # keep it
        return _on_meta(parameter)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()
