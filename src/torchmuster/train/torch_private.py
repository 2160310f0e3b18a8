"""The private names of torch that training uses. All exist in torch 2.12 to 2.15, on which tests ran.

| name | use |
|---|---|
| `utils._python_dispatch.TorchDispatchMode` | intercept and count every operation |
| `OptimizedModule._orig_mod` | remove this prefix from parameter names |
| `ActivationWrapper._checkpoint_wrapped_module` | remove this prefix from parameter names |
| `ops.aten._scaled_dot_product_…` | keep attention in selective recomputation |
| `_amp_foreach_non_finite_check_and_unscale_` | find non-finite gradients in one call, as GradScaler does |
| `_foreach_mul_` | multiply all gradients in one call |
| `Tensor._base` | distinguish views from tensors with their own memory |
| `Tensor._values` | read a sparse gradient without waiting for the device |
| `DataLoader._iterator`, `_shutdown_workers` | stop workers while something refers to their epoch |
| `DistributedDataParallel._get_ddp_logging_data` and its sample rate | DDP's time for communication |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

__all__ = ["TorchDispatchMode"]

# Sets its second argument if any tensor in its first is not finite.
non_finite_check: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
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
    torch._foreach_mul_(list(tensors), by)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base tensor of a view; the tensor itself if it is not a view."""
    base = tensor._base
    return tensor if base is None else base


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, which may have several values per position."""
    return tensor._values()


def stop_workers(loader: "DataLoader[Any]") -> None:
    """Stop a loader's worker processes, even if something still refers to its iterator."""
    at_work = loader._iterator
    stop: Callable[[], None] | None = getattr(at_work, "_shutdown_workers", None)
    if stop is not None:
        stop()


def let_ddp_measure(model: DistributedDataParallel, *, every: int) -> None:
    """Make DDP measure communication in every Nth iteration."""
    model._set_ddp_runtime_logging_sample_rate(every)  # type: ignore[no-untyped-call]


def ddp_measurements(model: DistributedDataParallel) -> Mapping[str, Any]:
    """Return DDP's measurements; call :func:`let_ddp_measure` first."""
    measured: Mapping[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return measured
