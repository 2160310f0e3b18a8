"""The private names of torch that the planner imports, each with why, and what would replace it.

Nothing else in ``plan/`` imports one. Of attributes of public classes it uses a few private ones in their places:
``Module._apply`` and what a module holds, and ``Reducer._rebuild_buckets`` of DDP (``imagined_world.py``, which replaces
both for a while), ``Tensor._is_view`` and ``UntypedStorage._cdata``, the address that tells storages apart (``live_storage.py``,
``limit.py``). Operations are told apart by their names in ``torch.ops.aten``, some of which begin with an underscore.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Tensors with shapes and types but without memory. torch.compile and torch.export are built on it, and
# torch.distributed._tools too. There is no public name for it.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as with_memory

# Where DTensor works out the shape of a result on tensors of *global* size, which no rank ever has. A public
# switch to leave such tensors out of what modes see would replace the patch.
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# The group whose collectives do nothing is registered by an import; ``init_process_group("fake")`` would replace
# it once torch registers it by itself.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Sees every operation. It is documented and used everywhere, but lives in a module with an underscore.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What torch's own FlopCounterMode counts by; that one looks at whole runs, not at stretches.
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = [
    "CANNOT_FOLLOW",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "backward_under_way",
    "computing_backward",
    "flop_registry",
    "paused_in_sharding_propagation",
    "sdpa_backward_flop_count",
    "sdpa_flop_count",
    "single_allocations",
    "tree_leaves",
    "tree_map",
    "with_memory",
]

# What is raised where something depends on the values of tensors, or has no rule for tensors without memory.
CANNOT_FOLLOW = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def computing_backward() -> bool:
    """Say whether a backward is under way in this thread; torch's own checkpointing asks in the same way.

    Hooks tell of a backward's parts, not of its end.
    """
    return torch._C._current_graph_task_id() != -1


def backward_under_way() -> int | None:
    """Return which operation's backward is under way, or has just given what is passed on; None outside of a backward."""
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
    name = "_propagate_tensor_meta_non_cached"
    computed = getattr(ShardingPropagator, name)

    def paused(*args: Any, **kwargs: Any) -> Any:
        pause()
        try:
            return computed(*args, **kwargs)
        finally:
            go_on()

    setattr(ShardingPropagator, name, paused)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, computed)
