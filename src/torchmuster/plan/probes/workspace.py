"""What operations take for a moment beside their results, on a CPU.

oneDNN computes convolutions and 16-bit matrix products on copies in an order of its own, attention has buffers of its own; all that
comes from torch's allocator. How much it is depends on shapes, number type and processor, and is written down
nowhere. So an operation of these shapes is computed once and what it takes is looked at.
"""

from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from torchmuster.plan.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    SAFE_SOFTMAX,
    single_allocations,
    tree_leaves,
    tree_map,
    with_memory,
)

_aten = torch.ops.aten
# How many of their first tensors have the samples as their first dimension.
_BY_SAMPLES = {
    _aten.convolution.default: 1,
    _aten.convolution_backward.default: 2,
    _aten.native_batch_norm_backward.default: 2,
    SAFE_SOFTMAX: 1,
    ATTENTION: 4,
    ATTENTION_BACKWARD: 7,
}
# The place of the matrix that may be copied.
_PRODUCTS = {
    _aten.mm.default: 1,
    _aten.bmm.default: 1,
    _aten.addmm.default: 2,
    _aten.baddbmm.default: 2,
}
_POINTWISE = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
_HALVES = (torch.float16, torch.bfloat16)
# What takes more memory or time than this is computed with fewer samples, or not at all.
_LARGEST_BYTES = 2**27
_MOST_FLOPS = 2**34
_measured: dict[str, int] = {}


def workspace_bytes(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, flops: int, made: Any
) -> int:
    """Return the most that an operation takes beside what it is given and returns (``made``)."""
    if operation in _POINTWISE:
        return _cast_bytes(args, made)
    if operation in _PRODUCTS:
        second = args[_PRODUCTS[operation]]
        if second.dtype not in _HALVES or not second.numel():
            return 0
        if _share_to_compute(args, flops) < 1.0:
            return int(second.numel() * second.itemsize)
        return _computed(operation, args, kwargs)
    if operation in _BY_SAMPLES:
        return _by_samples(operation, args, kwargs, flops)
    return 0


def _cast_bytes(args: tuple[Any, ...], made: torch.Tensor) -> int:
    """Return the room for what is first brought to the type of the result."""
    others = (
        one
        for one in args
        if isinstance(one, torch.Tensor) and one.ndim and one.dtype is not made.dtype
    )
    return sum(one.numel() * made.itemsize for one in others)


def _share_to_compute(args: tuple[Any, ...], flops: int) -> float:
    """Return how much of an operation may be computed for real; 1: all of it."""
    size = sum(
        one.numel() * one.itemsize for one in tree_leaves(args) if isinstance(one, torch.Tensor)
    )
    return min(1.0, _LARGEST_BYTES / max(size, 1), _MOST_FLOPS / max(flops, 1))


def _by_samples(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: int) -> int:
    samples = int(args[0].shape[0])
    many = max(int(samples * _share_to_compute(args, flops)), 2)
    if many >= samples:
        return _computed(operation, args, kwargs)
    # A straight line through two numbers of samples.
    few = many // 2
    places = _BY_SAMPLES[operation]
    most, less = (
        _computed(operation, *_with_samples((args, kwargs), number, places))
        for number in (many, few)
    )
    return max(most + round((most - less) / (many - few) * (samples - many)), 0)


def _with_samples(arguments: Any, samples: int, places: int) -> Any:
    """Return the arguments with so many samples in the first tensors."""
    tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
    given = {id(one) for one in tensors[:places] if one.shape[0] == tensors[0].shape[0]}

    def cut(one: Any) -> Any:
        if id(one) not in given:
            return one
        return one.as_strided((samples, *one.shape[1:]), one.stride())

    return tree_map(cut, arguments)


def _computed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    key = repr((str(operation), tree_map(_look, (args, kwargs))))
    if key not in _measured:
        with with_memory(), torch.no_grad():
            given_args, given_kwargs = tree_map(_made, (args, kwargs))
            operation(*given_args, **given_kwargs)  # the first time, code is made for it
            # acc_events: torch 2.12 warns of its default, which makes a difference only where a profiler starts twice.
            with profile(
                activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as seen:
                result = operation(*given_args, **given_kwargs)
            sizes = list(accumulate(single_allocations(seen)))
            _measured[key] = max(sizes, default=0) - (sizes[-1] if sizes else 0)
            del result
    return _measured[key]


def _look(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.stride(), str(argument.dtype))
    return argument


def _made(argument: Any) -> Any:
    """Return the argument with memory."""
    if not isinstance(argument, torch.Tensor):
        return argument
    reach = sum(
        (size - 1) * step for size, step in zip(argument.shape, argument.stride(), strict=True)
    )
    room = torch.zeros(reach + 1, dtype=argument.dtype)
    return room.as_strided(argument.shape, argument.stride())
