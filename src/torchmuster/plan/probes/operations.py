"""Flops, bytes and workspace of an operation, from its arguments and results without values."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchmuster.plan.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCH_NORM,
    MOVE_NOTHING,
    OVERWRITE,
    SAFE_SOFTMAX,
    arguments_of,
    single_allocations,
    tree_leaves,
    tree_map,
    with_memory,
)


def with_kept_statistics(
    operation: Any, args: tuple[Any, ...], result: Any, *, on_host: bool
) -> Any:
    """Return the result of an operation with the statistics' dtype of a real run.

    CUDA keeps them in 32 bits. A CPU does so if the dtype of the weights, or else of the running
    means, differs from the input's. The rule for tensors without memory always uses the input's
    dtype, with which the backward fails.
    """
    if operation not in BATCH_NORM:
        return result
    given, *parameters = args[:5]  # input, weight, bias, running mean and variance
    first = next((one for one in parameters if one is not None), given)
    if on_host and first.dtype is given.dtype:
        return result
    output, mean, deviation = result
    return output, mean.float(), deviation.float()


# The formulas of torch's FlopCounterMode, which counts whole runs, not sections.


# They only allocate, or return a view.
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
# They read only as much as their first result has; FSDP's also returns the whole buffer.
_COPY_A_PART = frozenset(["embedding", "index", "index_select", "gather", "all_gather_copy_in"])
# They read one number per row of logits; their backward writes rows of zeros with one number.
_READ_ONE_OF_A_ROW = frozenset(["nll_loss_forward", "nll_loss2d_forward"])
_FILL = frozenset(["nll_loss_backward", "nll_loss2d_backward"])
# In place, without reading the previous content.
_OVERWRITE = frozenset(["zero_", "fill_", "copy_", *OVERWRITE])


def tensors_in(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments, including those in lists.

    torch's pytree handles far more types than operations use, and took 10 % of a trace.
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
    """Return the bytes that an operation reads and writes; 0 for views and queries.

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
    written = made or _operations_written(func, args, kwargs)
    return _bytes(written) + _bytes(_read_operations(func, given, written))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors, each once; an expanded tensor counts at most its storage."""
    once = {id(one): one for one in tensors}.values()
    return sum(min(one.numel() * one.itemsize, one.untyped_storage().nbytes()) for one in once)


def _read_operations(
    func: Any, given: list[torch.Tensor], written: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the arguments that an operation reads."""
    name = func.overloadpacket.__name__
    if name in _FILL or name.endswith("_like") or name.startswith("new_"):
        return []  # only the shape
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random or name in _OVERWRITE or any(one.is_out for one in arguments_of(func)):
        known = {id(one) for one in written}
        return [one for one in given if id(one) not in known]
    return given


def _operations_written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that an operation without a result writes, by its schema."""
    arguments = arguments_of(func)
    by_name = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
    changed = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
    return tensors_in([by_name.get(name) for name in changed])


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the flops of matrix products, as torch's counter does."""
    if func is ATTENTION:
        return int(sdpa_flop_count(*(one.shape for one in args[:3])))  # type: ignore[no-untyped-call]
    if func is ATTENTION_BACKWARD:
        shapes = (one.shape for one in args[:4])
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


_aten = torch.ops.aten
# The number of their first tensors that have the samples as first dimension.
_BY_SAMPLES = {
    _aten.convolution.default: 1,
    _aten.convolution_backward.default: 2,
    _aten.native_batch_norm_backward.default: 2,
    SAFE_SOFTMAX: 1,
    ATTENTION: 4,
    ATTENTION_BACKWARD: 7,
}
# The position of the matrix that may be copied.
_PRODUCTS = {
    _aten.mm.default: 1,
    _aten.bmm.default: 1,
    _aten.addmm.default: 2,
    _aten.baddbmm.default: 2,
}
_POINTWISE = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
_HALVES = (torch.float16, torch.bfloat16)
# Operations with more memory or time than this are run with fewer samples, or not at all.
_LARGEST_BYTES = 2**27
_MOST_FLOPS = 2**34
_measured: dict[str, int] = {}


def workspace_bytes(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, flops: int, made: Any
) -> int:
    """Return the peak memory of an operation besides its arguments and results (``made``)."""
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
    """Return the memory for arguments that are first cast to the dtype of the result."""
    others = (
        one
        for one in args
        if isinstance(one, torch.Tensor) and one.ndim and one.dtype is not made.dtype
    )
    return sum(one.numel() * made.itemsize for one in others)


def _share_to_compute(args: tuple[Any, ...], flops: int) -> float:
    """Return the share of an operation that may be run for real; 1: all of it."""
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
    """Return the arguments with ``samples`` samples in the first tensors."""
    tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
    given = {id(one) for one in tensors[:places] if one.shape[0] == tensors[0].shape[0]}

    def cut(one: Any) -> Any:
        if id(one) not in given:
            return one
        return one.as_strided((samples, *one.shape[1:]), one.stride())

    return tree_map(cut, arguments)


def _computed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    key = repr((str(operation), tree_map(_look_operations, (args, kwargs))))
    if key not in _measured:
        with with_memory(), torch.no_grad():
            given_args, given_kwargs = tree_map(_made, (args, kwargs))
            operation(*given_args, **given_kwargs)  # the first call generates code
            # acc_events: torch 2.12 warns about the default, which matters only for restarts.
            with profile(
                activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as seen:
                result = operation(*given_args, **given_kwargs)
            sizes = list(accumulate(single_allocations(seen)))
            _measured[key] = max(sizes, default=0) - (sizes[-1] if sizes else 0)
            del result
    return _measured[key]


def _look_operations(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.stride(), str(argument.dtype))
    return argument


def _made(argument: Any) -> Any:
    """Return the argument as a tensor with memory."""
    if not isinstance(argument, torch.Tensor):
        return argument
    reach = sum(
        (size - 1) * step for size, step in zip(argument.shape, argument.stride(), strict=True)
    )
    room = torch.zeros(reach + 1, dtype=argument.dtype)
    return room.as_strided(argument.shape, argument.stride())
