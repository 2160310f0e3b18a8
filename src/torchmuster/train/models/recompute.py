"""Activation checkpointing: a block's intermediate results are computed again instead of kept.

It is put on blocks in place and changes no names. The order with others is: recompute, then compile, then shard, so
that each block is gathered once for its backward and computed again from what was gathered.
"""

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
from torchmuster.train.models.blocks import repeated_blocks
from torchmuster.train.torch_private import ATTENTION

Kind = Literal["full", "selective"]
# What takes long to compute for its size; everything else is computed again.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    *ATTENTION,
)


def recompute_blocks(model: nn.Module, kind: Kind = "full", *, every: int = 1) -> Decision[int]:
    """Compute the activations of every so-manieth block again in the backward; return how many blocks.

    ``full`` keeps only what goes into a block. ``selective`` also keeps the results of matrix products,
    convolutions and attention, which are most of the time and a part of the memory.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise Impossible(
            "asked to recompute activations, but the model has no repeated layers",
            why="nothing in it is a ModuleList or Sequential with two or more layers of one class",
            fix="leave it out, or call torch.utils.checkpoint.checkpoint in the model where it fits",
        )
    chosen = blocks[every - 1 :: every]
    for block in chosen:
        block.forward = partial(_recomputed, block.forward, kind)
    kept = "only their inputs are kept" if kind == "full" else "matrix products are kept"
    return Decision(
        value=len(chosen),
        reason=f"activations of {len(chosen)} of {len(blocks)} blocks are computed again in the "
        f"backward: {kept}",
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
    return frozenset(one.default for one in packets if one is not None)


_KEPT = _overloads()
# From torch 2.15: tensors that selective checkpointing keeps go through saved_tensors_hooks (save_on_cpu), as all others do.
_SELECTIVE_OPTIONS = {
    name: True for name in signature(checkpoint).parameters if name == "respect_saved_tensors_hooks"
}
