"""The private names of torch that the planner uses, beside those of training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchmuster.torch_internals import PrivateName, require

_aten = torch.ops.aten

NAMES = (
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "run a training on tensors that have shapes and no memory, as torch.compile does",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "compute with real values in the middle of that",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "name the operation of a model that needs values",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "name the operation of a model whose result has a shape that depends on values",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.UnsupportedOperatorException",
        "name the operation of a model that cannot be run without memory",
    ),
    PrivateName(
        "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
        "leave out the tensors of the whole model's size with which DTensor works out shapes",
    ),
    PrivateName("torch._C._current_graph_task_id", "know that a backward is running"),
    PrivateName("torch._C._current_autograd_node", "know which operation's backward is running"),
    PrivateName("torch.autograd.graph.Node._sequence_nr", "tell the backwards of operations apart"),
    PrivateName(
        "torch.distributed.Reducer._rebuild_buckets",
        "keep DDP from sorting gradients into other buckets after the first step, which reads values",
    ),
    PrivateName(
        "torch.utils._pytree.tree_leaves", "find the tensors among an operation's arguments"
    ),
    PrivateName("torch.utils._pytree.tree_map", "replace the arguments of an operation"),
    PrivateName("torch.UntypedStorage._cdata", "tell storages apart, also those without memory"),
    PrivateName(
        "torch.nn.Module._parameters", "put a parameter without memory in the place of another"
    ),
    PrivateName("torch.nn.Module._buffers", "put a buffer without memory in the place of another"),
    PrivateName(
        "torch.ops.aten.add.Tensor._schema", "know which of its arguments an operation writes into"
    ),
    PrivateName("torch.nn.Module._modules", "cut a model to fewer layers, and put the others back"),
    PrivateName(
        "torch.ops.aten._local_scalar_dense",
        "answer for a value that a training reads, such as a loss",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "count what attention computes",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "count what attention's backward computes and takes",
    ),
    PrivateName(
        "torch.ops.aten._safe_softmax", "measure the memory that softmax takes for a moment"
    ),
    PrivateName(
        "torch.ops.aten._native_batch_norm_legit",
        "correct the dtype of the statistics that batch normalisation keeps",
    ),
    PrivateName("torch.ops.c10d._allgather_base_", "count what a gather moves"),
    PrivateName("torch.ops.c10d._reduce_scatter_base_", "count what a reduce-scatter moves"),
    PrivateName("torch.ops.aten._unsafe_view", "know that this operation moves no memory"),
    PrivateName("torch.ops.aten._foreach_zero_", "know that this operation reads no memory"),
    PrivateName(
        "torch.ops.aten._foreach_copy_", "know that this operation does not read what it overwrites"
    ),
)
require(NAMES)

from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as with_memory  # noqa: E402
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

__all__ = ["FakeTensorMode", "tree_leaves", "tree_map", "with_memory"]

# What is raised where something depends on the values of tensors, or has no rule for tensors without memory.
CANNOT_FOLLOW = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

READ_VALUE = _aten._local_scalar_dense.default
ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SAFE_SOFTMAX = _aten._safe_softmax.default
BATCH_NORM = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
# Operations by name: those that move no memory, and those that do not look at what they overwrite.
MOVE_NOTHING = ("_unsafe_view",)
OVERWRITE = ("_foreach_zero_", "_foreach_copy_")

# Collectives by name.
ALL_GATHER, REDUCE_SCATTER = "_allgather_base_", "_reduce_scatter_base_"


def arguments_of(operation: Any) -> Sequence[Any]:
    """Return the arguments of an operation as its schema has them."""
    arguments: Sequence[Any] = operation._schema.arguments
    return arguments


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has, with or without memory."""
    return int(storage._cdata)


def parameters_and_buffers(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries in which a module itself keeps its parameters and its buffers."""
    return module._parameters, module._buffers


def computing_backward() -> bool:
    """Say whether a backward is running in this thread; torch's own checkpointing asks in the same way.

    Hooks tell of a backward's parts, not of its end.
    """
    return torch._C._current_graph_task_id() != -1


def backward_under_way() -> int | None:
    """Return which operation's backward is running, or has just given what is passed on; None outside of a backward."""
    node: Any = torch._C._current_autograd_node() if computing_backward() else None
    return None if node is None else int(node._sequence_nr())


def single_allocations(seen: torch.profiler.profile) -> list[int]:
    """Return what was taken (more than 0) and given back (less), in order.

    The profiler's public tables have sums only; this is the one list of single events.
    """
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [one.nbytes() for one in events if one.name() == "[memory]"]


@contextmanager
def paused_in_sharding_propagation(
    pause: Callable[[], Any], go_on: Callable[[], Any]
) -> Iterator[None]:
    """Call these around each computation of shapes by DTensor."""
    computed = ShardingPropagator._propagate_tensor_meta_non_cached

    def paused(*args: Any, **kwargs: Any) -> Any:
        pause()
        try:
            return computed(*args, **kwargs)
        finally:
            go_on()

    ShardingPropagator._propagate_tensor_meta_non_cached = paused  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = computed  # type: ignore[method-assign]


class ReducerWithFixedBuckets:
    """DDP's reducer without what reads values: sorting gradients into other buckets after the first step."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that a module holds, by name."""
    return dict(module._modules)


def put_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Let a module hold these modules and no others."""
    module._modules = children
