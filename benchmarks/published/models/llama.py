"""The models of the published rows, written as their trainers have them: norms by hand, complex rotations, SDPA.

``muster plan`` builds them by name: ``llama:llama3_8b``, or ``llama:llama3_8b_op`` with torchtitan's op-wise selective
recompute, which keeps attention and every second matrix product. The product's own ``selective`` keeps all products.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from decoder_memory import Decoder
from shapes import SHAPES
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_LONGEST = 32768  # rows of the table of rotations
_HELD: list[torch.Tensor] = []


class Norm(nn.Module):
    """RMSNorm as torchtitan had it in 2024: in float32, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention with fewer heads for keys and values than for queries."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.repeats = shape.heads // shape.key_heads
        self.wq = nn.Linear(shape.width, shape.query_width, bias=False)
        self.wk = nn.Linear(shape.width, shape.key_width, bias=False)
        self.wv = nn.Linear(shape.width, shape.key_width, bias=False)
        self.wo = nn.Linear(shape.query_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Attend to what came before."""
        heads = (*x.shape[:2], -1, self.head_width)
        query, key, value = self.wq(x), self.wk(x), self.wv(x)
        query, key = _turned(query.view(heads), turns), _turned(key.view(heads), turns)
        key, value = self._repeated(key), self._repeated(value.view(heads))
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        mixed = mixed.transpose(1, 2).contiguous()
        return self.wo(mixed.view(*x.shape[:2], -1))  # type: ignore[no-any-return]

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        if self.repeats == 1:
            return x
        batch, length, heads, width = x.shape
        wide = x.unsqueeze(3).expand(batch, length, heads, self.repeats, width)
        return wide.reshape(batch, length, heads * self.repeats, width)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = numbers * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Decoder, *, op_wise: bool) -> None:
        super().__init__()
        self.op_wise = op_wise
        self.attention_norm, self.attention = Norm(shape.width), Attention(shape)
        self.inner_norm = Norm(shape.width)
        self.w1 = nn.Linear(shape.width, shape.inner, bias=False)
        self.w2 = nn.Linear(shape.inner, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.inner, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Compute the layer, and again in the backward where so asked."""
        if not self.op_wise or not torch.is_grad_enabled():
            return self._compute(x, turns)
        return checkpoint(  # type: ignore[no-any-return]
            self._compute, x, turns, use_reentrant=False, context_fn=_every_second_product
        )

    def _compute(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.inner_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))  # type: ignore[no-any-return]


def _every_second_product() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Keep what torchtitan keeps: attention, and the first, third … matrix product of a block."""
    seen: Counter[str] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.__name__.partition(".")[0]
        kept = name.startswith("_scaled_dot_product")
        if name == "mm":
            turn = "again" if context.is_recompute else "forward"
            seen[turn] += 1
            kept = seen[turn] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return forward, again


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, shape: Decoder, *, op_wise: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape, op_wise=op_wise) for _ in range(shape.blocks))
        self.norm = Norm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        steps = torch.arange(0, shape.head_width, 2)[: shape.head_width // 2].float()
        angles = torch.outer(
            torch.arange(_LONGEST).float(), 500000.0 ** (-steps / shape.head_width)
        )
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return torchtitan's loss of the end of 2024: all logits in float32 at once."""
    predicted = model(batch["input_ids"])
    return F.cross_entropy(predicted.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def loss_as_it_comes(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of logits in their own number type, as in torchtitan of March 2024 and KempnerForge.

    Their loops keep the logits in a variable until the next ones are there, so they are here through the backward.
    """
    predicted = model(batch["input_ids"])
    _HELD[:] = [predicted]
    with torch.autocast(predicted.device.type, enabled=False):
        return F.cross_entropy(predicted.flatten(0, 1), batch["labels"].flatten(0, 1))


def __getattr__(name: str) -> Any:
    """Return a builder: a shape's name, with ``_op`` for op-wise recompute."""
    key, op_wise = name.removesuffix("_op"), name.endswith("_op")
    if key not in SHAPES:
        raise AttributeError(name)
    return lambda: Model(SHAPES[key], op_wise=op_wise)
