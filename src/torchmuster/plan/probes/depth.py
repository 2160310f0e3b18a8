"""How deep a model is, and the same model with fewer of its repeated layers."""

from copy import deepcopy
from dataclasses import dataclass

from torch import nn

from torchmuster.plan.torch_private import children_of, put_children
from torchmuster.train.models.blocks import repeated_blocks


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How many repeated layers a model has, and whether one stands for all."""

    blocks: int
    alike: bool  # of one class, in one list, with parameters of the same shapes


def depth_of(model: nn.Module) -> Depth:
    """Look at a model's repeated layers."""
    blocks = repeated_blocks(model)
    alike = (
        bool(blocks) and _list_of(model, blocks) is not None and len(set(map(_look, blocks))) == 1
    )
    return Depth(blocks=len(blocks), alike=alike)


def cut(model: nn.Module, blocks: int) -> None:
    """Keep the first so many repeated layers, in place; a model whose layers differ is left whole."""
    found = repeated_blocks(model)
    holder = _list_of(model, found)
    if holder is None or not depth_of(model).alike or blocks >= len(found):
        return
    before = children_of(holder)
    left_out = {id(one) for one in found[blocks:]}
    for place in reversed([at for at, one in enumerate(holder) if id(one) in left_out]):
        del holder[place]
    if list(map(id, repeated_blocks(model))) != list(map(id, found[:blocks])):
        # Beside so few layers, others look like the repeated ones, and would be sharded instead.
        put_children(holder, before)


def copied_with(model: nn.Module, blocks: int | None) -> nn.Module:
    """Return a copy of a model with its first so many repeated layers; None: with all of them.

    The rest is not copied, and the model itself is as it was.
    """
    holder = _list_of(model, repeated_blocks(model))
    if blocks is None or holder is None:
        return deepcopy(model)
    whole = children_of(holder)
    cut(model, blocks)
    try:
        return deepcopy(model)
    finally:
        put_children(holder, whole)


def _list_of(model: nn.Module, blocks: list[nn.Module]) -> nn.ModuleList | nn.Sequential | None:
    """Return the one list that holds all of the blocks."""
    wanted = {id(one) for one in blocks}
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and wanted <= set(map(id, module)):
            return module
    return None


def _look(block: nn.Module) -> tuple[object, ...]:
    parameters = (
        (name, tuple(one.shape), one.dtype, one.requires_grad)
        for name, one in block.named_parameters()
    )
    return (type(block), *parameters)
