"""The kinds of attention that torch has, each as a function of queries, keys and values."""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torchmuster.train.models.blocks import can_compile

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Kind:
    """One way to compute attention; made for a length, since a mask has one."""

    def __init__(self, make: Callable[[int], Attention], *, forward_only: str = "") -> None:
        self.make = make
        self.forward_only = forward_only


def available(
    names: tuple[str, ...], inputs: Inputs, *, causal: bool
) -> tuple[dict[str, Kind], dict[str, str]]:
    """Try every kind on a short sequence; return those that work, and why the others do not."""
    kinds: dict[str, Kind] = {}
    missing: dict[str, str] = {}
    device = inputs[0].device
    for name in names:
        if name == "flex":
            possible = can_compile(device)
            if not possible.value:
                missing[name] = f"{possible.reason}; not compiled it is no faster than plain"
                continue
        kind = _kind(name, causal, device)
        trouble = _trouble(kind, inputs)
        if trouble:
            missing[name] = trouble
        else:
            kinds[name] = kind
    return kinds, missing


def _kind(name: str, causal: bool, device: torch.device) -> Kind:
    if name == "plain":
        return Kind(lambda length: partial(plain, _mask(length, causal, device)))
    if name == "sdpa":
        return Kind(lambda length: partial(_sdpa, None, causal))
    if name == "flex":
        only = "torch has no backward of it on CPUs" if device.type == "cpu" else ""
        compiled = _compiled_flex()
        return Kind(lambda length: _flex(compiled, length, causal, device), forward_only=only)
    return Kind(lambda length: partial(_sdpa, _BACKENDS[name], causal))


def _trouble(kind: Kind, inputs: Inputs) -> str:
    """Say why a kind does not work here; nothing if it does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            output = kind.make(inputs[0].shape[-2])(*inputs)
            if not kind.forward_only:
                torch.autograd.grad(output.sum(), inputs)
        except (RuntimeError, NotImplementedError) as error:
            reasons = [*(str(one.message) for one in said), str(error)]
            first = next((one for one in reasons if one), type(error).__name__)
            return first.splitlines()[0].partition(". ")[0]
    return ""


def _mask(length: int, causal: bool, device: torch.device) -> torch.Tensor | None:
    """Return which keys come after a query."""
    if not causal:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def plain(
    later: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute attention as it is defined; ``later`` says which keys come after a query."""
    scores: torch.Tensor = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
    if later is not None:
        scores = scores.masked_fill(later, float("-inf"))
    attended: torch.Tensor = scores.softmax(-1) @ values
    return attended


def _sdpa(
    backend: SDPBackend | None,
    causal: bool,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(queries, keys, values, is_causal=causal)


def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _is_not_later(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


def _flex(compiled: Any, length: int, causal: bool, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None
    if causal:
        mask = create_block_mask(_is_not_later, None, None, length, length, device=device)

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if device.type == "cpu":  # where it refuses what needs a gradient
            queries, keys, values = queries.detach(), keys.detach(), values.detach()
        output: torch.Tensor = compiled(queries, keys, values, block_mask=mask)
        return output

    return attend
