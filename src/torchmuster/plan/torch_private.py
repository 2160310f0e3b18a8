"""The private torch names that the planner uses, in addition to the ones that training uses."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as with_memory
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# Private names, and what each is for:
# - torch._subclasses.fake_tensor.FakeTensorMode: run training steps on fake tensors (shapes without memory), as
#   torch.compile does
# - torch._subclasses.fake_tensor.unset_fake_temporarily: compute with real values within such a step
# - torch._subclasses.fake_tensor.DataDependentOutputException: name the operation of a model that needs tensor
#   values
# - torch._subclasses.fake_tensor.DynamicOutputShapeException: name the operation of a model whose output shape
#   depends on tensor values
# - torch._subclasses.fake_tensor.UnsupportedOperatorException: name the operation of a model that cannot run on
#   tensors without memory
# - torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached: ignore the
#   full-size tensors with which DTensor computes shapes
# - torch._C._current_graph_task_id: detect that a backward is running
# - torch._C._current_autograd_node: identify the operation whose backward is running
# - torch.autograd.graph.Node._sequence_nr: distinguish the backwards of operations
# - torch.distributed.Reducer._rebuild_buckets: prevent DDP from rebuilding its buckets after the first step, which
#   reads tensor values
# - torch.UntypedStorage._cdata: distinguish storages, including those without memory
# - torch.nn.Module._parameters: replace a parameter by one without memory
# - torch.nn.Module._buffers: replace a buffer by one without memory
# - torch.ops.aten._local_scalar_dense: supply a value that the training code reads, such as a loss
# - torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count the FLOPs of attention
# - torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: count the FLOPs and memory of attention's
#   backward
# - torch.ops.aten._native_batch_norm_legit: correct the dtype of the statistics of batch normalization

_aten = torch.ops.aten

__all__ = ["FakeTensorMode", "with_memory"]

# Raised if something depends on tensor values, or has no rule for tensors without memory.
CANNOT_FOLLOW = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

READ_VALUE = _aten._local_scalar_dense.default
ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH_NORM = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
WITH_SCRATCH = (
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.native_batch_norm_backward.default,
)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is unique among live storages, with or without memory."""
    return int(storage._cdata)


def parameters_and_buffers(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own dictionaries of parameters and buffers."""
    return module._parameters, module._buffers


def computing_backward() -> bool:
    """Return whether a backward is running in this thread, as torch's checkpointing does.

    Hooks report parts of a backward, not its end.
    """
    return torch._C._current_graph_task_id() != -1


def current_backward() -> int | None:
    """Return the operation whose backward is running or has just returned; None outside."""
    node: Any = torch._C._current_autograd_node() if computing_backward() else None
    return None if node is None else int(node._sequence_nr())


@contextmanager
def paused_in_sharding_propagation(
    pause: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Enter ``pause`` for each shape computation of DTensor, on tensors of the whole size."""
    computed = ShardingPropagator._propagate_tensor_meta_non_cached

    def paused(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return computed(*args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = paused  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = computed  # type: ignore[method-assign]


class ReducerWithFixedBuckets:
    """DDP's reducer without rebuilding buckets after the first step, which reads values."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def allocations_in(profiler: torch.profiler.profile) -> list[int]:
    """Return allocated (positive) and freed (negative) bytes, in order.

    The profiler's public tables have only sums.
    """
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [event.nbytes() for event in events if event.name() == "[memory]"]
