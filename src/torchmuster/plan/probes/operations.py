"""What an operation computes and moves: from its arguments and results, without their values."""

from collections.abc import Sequence
from typing import Any

import torch

# What torch's own FlopCounterMode counts by; that one looks at whole runs, not at stretches.
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchmuster.plan.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MOVE_NOTHING,
    OVERWRITE,
    arguments_of,
)

# They only make room, or look at what is there in another way.
_MOVE_NOTHING = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        *MOVE_NOTHING,
    ]
)
# They read as much as their first result has, of something larger; FSDP's also returns all that its result is a part of.
_COPY_A_PART = frozenset(["embedding", "index", "index_select", "gather", "all_gather_copy_in"])
# They read one number of a row of logits; backwards they make rows of zeros with one number, and read none.
_READ_ONE_OF_A_ROW = frozenset(["nll_loss_forward", "nll_loss2d_forward"])
_FILL = frozenset(["nll_loss_backward", "nll_loss2d_backward"])
# In place, but what was there before is not looked at.
_OVERWRITE = frozenset(["zero_", "fill_", "copy_", *OVERWRITE])


def tensors_in(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments, and in lists there.

    torch's own walk through trees knows far more than operations take, and was a tenth of a trace.
    """
    found: list[torch.Tensor] = []
    for one in arguments:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += tensors_in(one)
    return found


def moved_bytes_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    given: list[torch.Tensor],
    made: list[torch.Tensor],
) -> int:
    """Return the bytes that an operation reads and writes; nothing for views and questions.

    ``given`` and ``made`` are the tensors in its arguments and in its result.
    """
    name = func.overloadpacket.__name__
    if name in _MOVE_NOTHING or func.is_view or func.namespace == "prim":
        return 0
    if name in _COPY_A_PART:
        return 2 * _bytes(made[:1])
    if name in _READ_ONE_OF_A_ROW:
        logits, target, *_ = given
        return target.numel() * logits.itemsize + _bytes([target, *made])
    written = made or _written(func, args, kwargs)
    return _bytes(written) + _bytes(_read(func, given, written))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors, each once; what is repeated without a copy has no more than its storage."""
    once = {id(one): one for one in tensors}.values()
    return sum(min(one.numel() * one.itemsize, one.untyped_storage().nbytes()) for one in once)


def _read(func: Any, given: list[torch.Tensor], written: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what an operation looks at of what it is given."""
    name = func.overloadpacket.__name__
    if name in _FILL or name.endswith("_like") or name.startswith("new_"):
        return []  # only the shape
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random or name in _OVERWRITE or any(one.is_out for one in arguments_of(func)):
        known = {id(one) for one in written}
        return [one for one in given if id(one) not in known]
    return given


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation without a result writes, as its schema says."""
    arguments = arguments_of(func)
    by_name = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
    changed = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
    return tensors_in([by_name.get(name) for name in changed])


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the multiplications and additions of matrix products, as torch's own counter has them."""
    if func is ATTENTION:
        return int(sdpa_flop_count(*(one.shape for one in args[:3])))  # type: ignore[no-untyped-call]
    if func is ATTENTION_BACKWARD:
        shapes = (one.shape for one in args[:4])
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
