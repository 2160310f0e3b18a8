"""Activation checkpointing: the same gradients with less memory, and attention in its fast form."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from torchmuster.train.models.blocks import recompute_blocks

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + scale * F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def trained(*how: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients and how many bytes were kept for the backward."""
    torch.manual_seed(0)
    model = Model()
    names = list(model.state_dict())
    if how:
        recompute_blocks(model, *how)
    assert list(model.state_dict()) == names
    kept: dict[int, int] = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, 8, 16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().sum()
    loss.backward()
    return {n: one.grad for n, one in model.named_parameters() if one.grad is not None}, sum(
        kept.values()
    )


@pytest.mark.parametrize("how", ["full", 2, "selective"])
def test_gradients_are_the_same_to_the_last_bit_with_dropout(how: str | int) -> None:
    plain, _ = trained()
    found, _ = trained(how)
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_less_is_kept_for_the_backward() -> None:
    everything = trained()[1]
    half = trained(2)[1]
    nothing = trained("full")[1]
    assert nothing < half < everything
    assert nothing < 0.2 * everything
    assert half == pytest.approx((everything + nothing) / 2, rel=0.1)


def test_selective_does_not_repeat_matrix_products() -> None:
    def products(*how: str) -> int:
        torch.manual_seed(0)
        model = Model()
        if how:
            recompute_blocks(model, *how)  # type: ignore[arg-type]
        x = torch.randn(2, 8, 16)
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        return int(counter.get_total_flops())

    assert products("selective") == products()
    assert products("full") > products()


def test_attention_is_the_plain_formula() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    scores = (q @ k.transpose(-1, -2)) / 16**0.5
    scores = scores.masked_fill(torch.ones(8, 8).tril() == 0, float("-inf"))
    expected = scores.softmax(-1) @ v
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(found, expected, atol=1e-6)
