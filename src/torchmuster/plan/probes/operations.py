"""Flops and moved bytes of an operation, from its arguments and results without values."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchmuster.plan.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCH_NORM,
    WITH_SCRATCH,
    allocations_in,
    with_memory,
)

_MOVE_NOTHING = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_unsafe_view",
)
# They read only as much as their first result has; FSDP's also returns the whole buffer.
_COPY_A_PART = ("embedding", "index", "index_select", "gather", "all_gather_copy_in")
# They read one number per row of logits; their backward writes rows of zeros with one number.
_READ_ONE_OF_A_ROW = ("nll_loss_forward", "nll_loss2d_forward")
_scratch_bytes: dict[str, int] = {}  # by operation, shapes and dtypes


def with_float32_statistics(
    operation: Any, args: tuple[Any, ...], result: Any, *, on_host: bool
) -> Any:
    """Return the result of a batch norm with the statistics' dtype of a real run.

    CUDA keeps them in 32 bits. A CPU does so if the dtype of the weights, or else of the running
    means, differs from the input's. The rule for tensors without memory always uses the input's
    dtype, with which the backward fails.
    """
    if operation not in BATCH_NORM:
        return result
    batch, *parameters = args[:5]  # input, weight, bias, running mean and variance
    first = next((tensor for tensor in parameters if tensor is not None), batch)
    if on_host and first.dtype is batch.dtype:
        return result
    output, mean, deviation = result
    return output, mean.float(), deviation.float()


def tensors_in(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, including those in lists, tuples and dictionaries.

    torch's pytree handles far more types than operations use, and took 10 % of a trace. A recursive
    function inside a function would keep its tensors alive until the garbage collector runs.
    """
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, list | tuple):
            tensors += tensors_in(argument)
        elif isinstance(argument, dict):
            tensors += tensors_in(argument.values())
    return tensors


def moved_bytes_of(
    operation: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> int:
    """Return the bytes that an operation reads and writes; 0 for views and queries."""
    name = operation.overloadpacket.__name__
    if name in _MOVE_NOTHING or operation.is_view:
        return 0
    if name in _COPY_A_PART:
        return 2 * _bytes(results[:1])
    if name in _READ_ONE_OF_A_ROW:
        logits, target, *_ = inputs
        return target.numel() * logits.itemsize + _bytes([target, *results])
    return _bytes(inputs) + _bytes(results or tensors_in(args[:1]))  # what it changes in place


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors; an expanded tensor counts at most its storage."""
    total = 0
    for tensor in tensors:
        total += min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
    return total


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the flops of matrix products and attention, as torch's counter does."""
    if operation is ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if operation is ATTENTION_BACKWARD:
        shapes = (tensor.shape for tensor in args[:4])
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(operation.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def scratch_bytes_of(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the memory that a CPU kernel takes for a moment, in addition to its results.

    oneDNN copies the tensors of a convolution into other layouts, in memory of torch's allocator.
    Only the kernel knows how much it takes, so it runs on zeros, once for each shape.
    """
    if operation not in WITH_SCRATCH:
        return 0
    key = str(operation)
    for argument in args:
        key += f" {_layout_of(argument) if isinstance(argument, torch.Tensor) else argument}"
    if key not in _scratch_bytes:
        with with_memory(), torch.no_grad():
            values = [_zeros_like(argument) for argument in args]
            operation(*values)  # the first call compiles the kernel
            with profile(
                activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as profiler:
                results = operation(*values)
            levels = list(accumulate(allocations_in(profiler)))
            del results
        _scratch_bytes[key] = max(levels) - levels[-1]
    return _scratch_bytes[key]


def _layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _zeros_like(argument: Any) -> Any:
    """Return a tensor with memory, of the same layout; other arguments are unchanged."""
    if not isinstance(argument, torch.Tensor):
        return argument
    values = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
    return values.zero_()
