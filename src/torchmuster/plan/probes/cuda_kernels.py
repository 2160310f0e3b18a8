"""Replace CPU operations by CUDA's variants, which need other memory: norms, attention, optimizers.

The trace runs on CPU tensors, without CUDA. The sizes here come from torch's sources; none was
measured on a GPU.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch.nn import functional

_HALVES = (torch.float16, torch.bfloat16)
_ROUNDED = 128  # positions of a row that flash attention computes at once


@contextmanager
def fused_as_on_cuda(kernels: Literal["cpu", "cuda"]) -> Iterator[None]:
    """Use single fused operations inside the ``with`` where CUDA does; no change for the CPU.

    Modules that imported a function by name are patched, too.
    """
    if kernels == "cpu":
        yield
        return
    before = torch.rms_norm  # what nn.RMSNorm and functional.rms_norm call

    def fused(
        given: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is not None and weight.dtype is not given.dtype:
            return before(given, normalized_shape, weight, eps)  # there is no fused kernel here
        result: torch.Tensor = _FusedRmsNorm.apply(given, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
        return result

    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def fused_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        # CUDA's kernels apply dropout themselves and keep a seed; the CPU kernel has no dropout,
        # and its replacement keeps a number for each pair of tokens.
        return attention(query, key, value, attn_mask, 0.0, *rest, **named)

    def fused_dropout(
        input: torch.Tensor,  # noqa: A002  # as torch calls it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or inplace or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]  # its mask is of bools
        return dropped

    replacements = {id(before): fused, id(attention): fused_attention, id(dropout): fused_dropout}
    patched: list[tuple[Any, str, Any]] = []
    for module in (torch, functional, *_modules_outside_torch()):
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                patched.append((module, name, value))
    for module, name, value in patched:
        setattr(module, name, replacements[id(value)])
    try:
        yield
    finally:
        for module, name, value in patched:
            setattr(module, name, value)


def _modules_outside_torch() -> list[ModuleType]:
    """Return the loaded modules, in which a model's code may have imported a function by name."""
    modules = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "torch":
            modules.append(module)
    return modules


def as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Set an optimizer to ``foreach``, which is torch's default on CUDA but not on the CPU."""
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = True


def room_of_attention_backward(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the temporary memory of flash attention's backward: float32 sums, keys per head."""
    batch, heads, length, size = query.shape
    if query.dtype not in _HALVES:
        return 0
    rounded = math.ceil(length / _ROUNDED) * _ROUNDED
    per_head = batch * heads * rounded * 4
    room = per_head * (1 + math.ceil(size / 32) * 32)
    if key.shape[1] != heads:
        room += 2 * batch * heads * key.shape[2] * size * query.itemsize
    return room


class _FusedRmsNorm(torch.autograd.Function):
    """The memory of the fused kernel: its input and one number per row. Values are not computed."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, dimensions: int, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Create the result, and keep what the backward needs."""
        rows = given.shape[: given.ndim - dimensions]
        scale = torch.zeros(rows, dtype=torch.float32, device=given.device)
        ctx.save_for_backward(given, weight, scale)
        if weight is None:
            return given.clone()
        return given.mul(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Create the gradients."""
        _, weight, _ = ctx.saved_tensors
        of_weight = None
        if weight is not None and ctx.needs_input_grad[2]:
            of_weight = torch.zeros_like(weight)
        return gradients[0].clone(), None, of_weight
