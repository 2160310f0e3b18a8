"""The private names of torch that training uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

# Private names, and what each is for:
# - torch.utils._python_dispatch.TorchDispatchMode: intercept and count every operation
# - torch._dynamo.eval_frame.OptimizedModule._orig_mod: leave the wrapper of torch.compile out of the names of
#   parameters; without it, the names of a compiled model's parameters have a prefix
# - torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper._checkpoint_wrapped_module: remove
#   the prefix that torch's checkpoint wrapper adds to parameter names; without it, parameter names are shown with
#   the prefix
# - torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: keep the results of attention in selective
#   recomputation; without it, attention is recomputed
# - torch.ops.aten._scaled_dot_product_flash_attention: keep the results of attention in selective recomputation;
#   without it, attention is recomputed
# - torch.ops.aten._scaled_dot_product_efficient_attention: keep the results of attention in selective
#   recomputation; without it, attention is recomputed
# - torch.ops.aten._scaled_dot_product_cudnn_attention: keep the results of attention in selective recomputation;
#   without it, attention is recomputed
# - torch._amp_foreach_non_finite_check_and_unscale_: find non-finite gradients in one call, as torch's GradScaler
#   does; without it, the largest gradient is checked instead, which takes up to five times as long
# - torch._foreach_mul_: multiply all gradients in one call; without it, gradients are multiplied one by one
# - torch.Tensor._base: distinguish views from tensors with their own memory when a plan traces a backward; without
#   it, plans overestimate accumulated gradients slightly
# - torch.Tensor._values: read the values of a sparse gradient without waiting for the device; without it, the
#   gradient is coalesced first
# - torch.utils.data.DataLoader._iterator: stop loader workers while other objects still refer to their epoch;
#   without it, the workers stop when the last reference is gone
# - torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers: stop loader workers while other
#   objects still refer to their epoch; without it, the workers stop when the last reference is gone
# - torch.nn.parallel.DistributedDataParallel._set_ddp_runtime_logging_sample_rate: set how often DDP measures
#   communication; without it, DDP's share of communication is not reported
# - torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data: read how long DDP waited for communication;
#   without it, DDP's share of communication is not reported

__all__ = ["TorchDispatchMode"]

# Sets its second argument if any tensor in its first is not finite; None if torch does not have it.
non_finite_check: Callable[..., None] | None = getattr(
    torch, "_amp_foreach_non_finite_check_and_unscale_", None
)
# Prefixes that recomputation and torch.compile add to module names.
WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
# Attention operations by name.
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def multiply_all(tensors: Sequence[torch.Tensor], by: float | torch.Tensor) -> None:
    """Multiply tensors in place."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(list(tensors), by)
    else:
        for tensor in tensors:
            tensor.mul_(by)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base tensor of a view; the tensor itself if it is not a view."""
    base: torch.Tensor | None = getattr(tensor, "_base", None)
    return tensor if base is None else base


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, which may have several values per position."""
    return tensor._values() if hasattr(tensor, "_values") else tensor.coalesce().values()


def stop_workers(loader: "DataLoader[Any]") -> None:
    """Stop a loader's worker processes, even if something still refers to its iterator."""
    at_work = getattr(loader, "_iterator", None)
    stop: Callable[[], None] | None = getattr(at_work, "_shutdown_workers", None)
    if stop is not None:
        stop()


def let_ddp_measure(model: DistributedDataParallel, *, every: int) -> bool:
    """Make DDP measure communication in every Nth iteration; return False if it cannot."""
    if not hasattr(model, "_get_ddp_logging_data"):
        return False
    if not hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
        return False
    model._set_ddp_runtime_logging_sample_rate(every)  # type: ignore[no-untyped-call]
    return True


def ddp_measurements(model: DistributedDataParallel) -> Mapping[str, Any]:
    """Return DDP's measurements; call :func:`let_ddp_measure` first."""
    measured: Mapping[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return measured
