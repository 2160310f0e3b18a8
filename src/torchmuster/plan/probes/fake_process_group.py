"""A fake process group of any size in one process, without tensor memory and communication.

The code of ``train/`` runs in it unchanged. Code that reads values or waits for other ranks is
replaced while the ``with`` is active.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchmuster.errors import MusterError
from torchmuster.plan.torch_private import (
    FakeTensorMode,
    ReducerWithFixedBuckets,
    parameters_and_buffers,
    with_memory,
)
from torchmuster.train.strategies import ddp, fsdp
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World

NoteReduction = Callable[[torch.Tensor], None]  # of a bucket of gradients


@contextmanager
def fake_process_group(
    ranks: int, *, ranks_per_machine: int, reduced: NoteReduction
) -> Iterator[World]:
    """Act as rank 0 of ``ranks``; ``reduced`` receives the reductions that DDP would start."""
    if dist.is_initialized():
        raise MusterError(
            "training cannot be traced in a process that has joined a process group",
            why="torch has only one default process group",
            fix="plan in a separate process",
        )
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        with ExitStack() as stack:
            # Fake tensors are on the device already.
            stack.enter_context(_replaced(Strategy, "place", lambda strategy, model: model))
            wrapper = _ddp_without_communication(reduced)
            stack.enter_context(_replaced(ddp, "DistributedDataParallel", wrapper))
            for holder, name in (
                (fsdp, "init_device_mesh"),
                (DeviceMesh, "__init__"),
                (DeviceMesh, "__getitem__"),
            ):
                with_values = _on_real_tensors(getattr(holder, name))
                stack.enter_context(_replaced(holder, name, with_values))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield World(
                global_rank=0,
                local_rank=0,
                node_rank=0,
                world_size=ranks,
                local_world_size=min(ranks, ranks_per_machine),
                device=torch.device("cpu"),
                backend="fake",
            )
    finally:
        dist.destroy_process_group()


@contextmanager
def _replaced(holder: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, by)
    try:
        yield
    finally:
        setattr(holder, name, before)


class _Silent:
    """Replacement of DDP's logger, which would query times."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _ddp_without_communication(reduced: NoteReduction) -> type[DistributedDataParallel]:
    class ImaginedDdp(DistributedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["init_sync"] = False  # no other rank has values
            super().__init__(*args, **kwargs)
            # Without a hook, the reducer waits for a collective that never completes.
            self.register_comm_hook(None, self._complete)
            self.reducer: Any = ReducerWithFixedBuckets(self.reducer)
            self.logger: Any = _Silent()

        @staticmethod
        def _complete(
            state: object,
            bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks at the annotation
        ) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            reduced(buffer)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

    return ImaginedDdp


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run on real tensors: device meshes compute with the values of small rank tensors."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        with with_memory():
            return function(*args, **kwargs)

    return computed


@contextmanager
def values_matter(world: World) -> Iterator[None]:
    """Give tensors memory inside the ``with``, even in a trace: a model's code may read them."""
    if world.backend != "fake":
        yield
        return
    with with_memory():
        yield


def forget_values(model: nn.Module, world: World) -> None:
    """Give a model fake tensors without memory; unchanged outside a trace."""
    if world.backend != "fake":
        return
    without: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied parameters stay tied
    for module in model.modules():
        for holder in parameters_and_buffers(module):
            for name, tensor in holder.items():
                if tensor is None:
                    continue
                if id(tensor) not in without:
                    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    without[id(tensor)] = tensor, empty
                holder[name] = without[id(tensor)][1]


@contextmanager
def masks_of_real_runs(*, packed: bool) -> Iterator[None]:
    """Make transformers build the masks of a real run; without values it builds all possible ones.

    Enter after the model is built: only then is it known whether transformers is in use.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or packed:
        yield
        return
    with _replaced(masking, "find_packed_sequence_indices", lambda position_ids: None):
        yield
