"""The repeated layers of a model: the units of sharding, recomputation and compilation."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.torch_private import ATTENTION


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated layers, in the order of the model; empty if nothing repeats.

    They are the layers of one class in the model's largest lists (``ModuleList``, ``Sequential``): the
    layers of a transformer (of encoder and decoder), the blocks of a residual network. Lists
    within a layer are part of it. Wrappers around the model (DDP, peft) make no difference.
    """
    lists = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            members = _alike(module)
            if members:
                lists.append((module, members))
    # The relevant list may be inside a list, next to its repeated layers: a stem and a head
    # of one class do not include the blocks between them.
    within: set[int] = set()
    for _, members in lists:
        for layer in members:
            within.update(map(id, layer.modules()))
    outermost = [members for module, members in lists if id(module) not in within]
    if not outermost:
        return []
    largest = max(outermost, key=_weights_of)
    # Encoder and decoder have about the same size. A short list of heads or adapters is not
    # worth a separate collective.
    chosen = [
        members
        for members in outermost
        if _kind_of(members[0]) == _kind_of(largest[0])
        or 4 * _weights_of(members) >= _weights_of(largest)
    ]
    return list({id(block): block for members in chosen for block in members}.values())


def _alike(listed: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """Return the members of a list that are of one class, if two or more have parameters."""
    by_kind: dict[Any, list[nn.Module]] = {}
    for member in listed:
        if _weights_of([member]) and not isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            by_kind.setdefault(_kind_of(member), []).append(member)
    repeated = [members for members in by_kind.values() if len(members) > 1]
    return max(repeated, key=_weights_of, default=[])


def _kind_of(module: nn.Module) -> Any:
    """Return a key that is equal for similar layers: class, or contents of a ``Sequential``."""
    if isinstance(module, nn.Sequential):
        return (nn.Sequential, *(_kind_of(member) for member in module))
    return type(module)


def _weights_of(modules: list[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


def compile_blocks(model: nn.Module) -> int:
    """Compile the repeated layers of a model in place, or the whole model if nothing repeats.

    Returns how many modules are compiled when they are first called. Call it after recomputation is
    set up and before sharding.
    """
    blocks = repeated_blocks(model) or [model]
    for block in blocks:
        if type(block).forward.__module__.startswith("torch."):
            # torch skips its own code unless other code calls it, and then compiles nothing.
            block.forward = partial(_call, block.forward)
        block.compile()
    return len(blocks)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


Kind = Literal["full", "selective"]
# Results that are expensive for their size; everything else is recomputed.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    *ATTENTION,
)


def recompute_blocks(model: nn.Module, how: Kind | int = "full") -> Decision[int]:
    """Recompute the activations of the model's repeated layers in the backward; return of how many.

    ``full`` keeps only the inputs of a layer, and an integer N does so in every Nth layer. ``selective``
    also keeps the results of matrix products, convolutions and attention, which take most of the
    time and a part of the memory.
    """
    kind: Kind = "selective" if how == "selective" else "full"
    every = how if isinstance(how, int) else 1
    blocks = repeated_blocks(model)
    if not blocks:
        raise Impossible(
            "activation checkpointing was requested, but the model has no repeated layers",
            why="it has no ModuleList or Sequential with two or more layers of one class",
            fix="remove it, or call torch.utils.checkpoint.checkpoint in the model where it fits",
        )
    chosen = blocks[every - 1 :: every]
    for block in chosen:
        block.forward = partial(_recomputed, block.forward, kind)
    memory = "only their inputs are kept"
    if kind == "selective":
        memory = "matrix products are kept"
    return Decision(
        value=len(chosen),
        reason=f"activations of {len(chosen)} of {len(blocks)} blocks are recomputed in the "
        f"backward pass: {memory}",
    )


def _recomputed(forward: Callable[..., Any], kind: Kind, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if kind == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    options = {"context_fn": _selective, **_SELECTIVE_OPTIONS, **kwargs}
    return checkpoint(forward, *args, use_reentrant=False, **options)


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return forward, again


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _overloads() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in _KEPT_NAMES]
    return frozenset(packet.default for packet in packets if packet is not None)


_KEPT = _overloads()
# From torch 2.15: tensors that selective checkpointing keeps go through saved_tensors_hooks
# (save_on_cpu), like all others.
_SELECTIVE_OPTIONS = {
    name: True for name in signature(checkpoint).parameters if name == "respect_saved_tensors_hooks"
}
