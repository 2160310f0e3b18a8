"""The repeated layers of a model: the pieces by which it is sharded, recomputed and compiled."""

from typing import Any

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated layers, in the order of the model; none if nothing repeats.

    They are the layers of one class in the model's largest lists (``ModuleList``, ``Sequential``): the
    layers of a transformer, those of encoder and decoder, the blocks of a residual network. Lists
    within a layer are part of it. Wrappers around the model (DDP, peft) make no difference.
    """
    lists = [
        (module, members)
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and (members := _alike(module))
    ]
    # Below a list, but beside its repeated layers, there may be the list that matters: a stem and a head
    # of one class do not make the blocks between them a part of something.
    within = {id(one) for _, members in lists for layer in members for one in layer.modules()}
    outermost = [members for module, members in lists if id(module) not in within]
    if not outermost:
        return []
    largest = max(outermost, key=_size)
    # An encoder beside a decoder has about the same size. A short list of heads or adapters is not
    # worth a collective of its own.
    kept = [
        members
        for members in outermost
        if _kind(members[0]) == _kind(largest[0]) or 4 * _size(members) >= _size(largest)
    ]
    return list({id(block): block for members in kept for block in members}.values())


def _alike(listed: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """Return those members of a list that are of one class, where that is two or more with parameters."""
    by_kind: dict[Any, list[nn.Module]] = {}
    for member in listed:
        if _size([member]) and not isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            by_kind.setdefault(_kind(member), []).append(member)
    repeated = [members for members in by_kind.values() if len(members) > 1]
    return max(repeated, key=_size, default=[])


def _kind(module: nn.Module) -> Any:
    """Return what makes two layers alike: their class; for a ``Sequential``, what it is made of."""
    if isinstance(module, nn.Sequential):
        return (nn.Sequential, *(_kind(member) for member in module))
    return type(module)


def _size(modules: list[nn.Module]) -> int:
    return sum(one.numel() for module in modules for one in module.parameters())
