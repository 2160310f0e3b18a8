"""Check each exercise and recognize its mistakes."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchmuster.labs.probes.bench import Bench, compare, is_close, mistake, require
from torchmuster.labs.probes.spying import Operations

_LAYERS, _EVERY, _LENGTH = 7, 3, 48


def _layers(dropout: float) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)) for _ in range(_LAYERS)]


def _gradients(model: nn.Module, layers: list[nn.Module]) -> torch.Tensor:
    torch.manual_seed(2)
    output = model(torch.ones(3, 4))
    if not output.requires_grad:
        mistake(
            "reentrant-loses-gradients",
            "the output does not require gradients: backward stops there",
        )
    output.pow(2).sum().backward()
    given = [one.grad for layer in layers for one in layer.parameters()]
    lost = [one for one in given if one is None]
    require(not lost, "reentrant-loses-gradients", f"{len(lost)} parameters have no gradient")
    return torch.cat([one.flatten() for one in given if one is not None])


def checkpointing(bench: Bench) -> None:
    """Equal gradients from recomputed layers."""
    warnings.simplefilter("ignore")  # torch warns about the mistakes recognized here
    for dropout, otherwise in ((0.0, "wrong-value"), (0.5, "dropout-differs")):
        plain = _layers(dropout)
        expected = _gradients(nn.Sequential(*plain), plain)
        layers = _layers(dropout)
        calls = [0] * _LAYERS
        for place, layer in enumerate(layers):
            layer.register_forward_hook(_counting(calls, place))
        stack = bench.code.CheckpointedStack(layers, _EVERY)
        torch.manual_seed(2)
        stack(torch.ones(3, 4))
        left_out = f"layers were called {calls} times"
        require(min(calls) > 0, "layers-left-out", left_out)
        calls[:] = [0] * _LAYERS
        given = _gradients(stack, layers)
        require(sum(calls) > _LAYERS, "nothing-recomputed", f"layers were called {calls} times")
        seen = "the gradients differ from those without checkpoints"
        require(is_close(given, expected), otherwise, seen)


def _counting(calls: list[int], place: int) -> Callable[..., None]:
    def count(*_: Any) -> None:
        calls[place] += 1

    return count


def attention(bench: Bench) -> None:
    """The outputs of plain attention, without the score matrix."""
    torch.manual_seed(3)
    inputs = [torch.randn(1, 2, _LENGTH, 8) for _ in range(3)]
    queries, keys, values = inputs
    squares = [0]

    def look(_: str, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.shape[-2:] == (_LENGTH, _LENGTH):
            squares[0] += 1

    for causal in (False, True):
        with Operations(look):
            given = bench.code.attention(queries, keys, values, causal)
        not_scaled = _plain(*inputs, causal=causal, scale=1.0)
        require(not is_close(given, not_scaled), "attention-not-scaled")
        forgot = causal and is_close(given, _plain(*inputs, causal=False, scale=8**-0.5))
        require(not forgot, "not-causal", "causal=True gave what causal=False gives")
        compare(given, _plain(*inputs, causal=causal, scale=8**-0.5), "attention")
    seen = f"{squares[0]} tensors of {_LENGTH} x {_LENGTH} were created"
    require(not squares[0], "plain-attention", seen)


def _plain(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    scores = queries @ keys.transpose(-2, -1) * scale
    if causal:
        later = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, dim=-1) @ values


class _Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)
        self.largest = 0
        self.with_gradients = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, len(inputs))
        self.with_gradients = self.with_gradients or torch.is_grad_enabled()
        result: torch.Tensor = self.layer(inputs)
        return result


def frugality(bench: Bench) -> None:
    """Micro-batches, the same step, no graphs kept."""
    inputs = torch.randn(2, 10, 2, generator=torch.Generator().manual_seed(4))
    batches = [(one, one.sum(1, keepdim=True)) for one in inputs]
    criterion = nn.MSELoss()
    model = _Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = bench.code.train_frugally(model, batches, criterion, optimizer, 4)
    held = any(isinstance(one, torch.Tensor) for one in losses)
    require(not held, "losses-keep-graphs", "the losses are tensors")
    seen = f"{model.largest} samples went through the model at once, not 4"
    require(model.largest <= 4, "whole-batch-at-once", seen)
    weight = model.layer.weight
    piled = _reference(batches, zero_grad=False)[0]
    require(not is_close(weight, piled), "gradients-pile-up")
    expected, wanted = _reference(batches)
    unweighted = is_close(weight, _reference(batches, parts=4)[0])
    require(not unweighted, "parts-not-weighted", "10 samples are 4 + 4 + 2, not three times 4")
    compare(weight, expected, "the weights after two batches")
    compare(losses, wanted, "the losses of two batches")
    model.with_gradients = False
    mean = bench.code.validate_frugally(
        model, [*batches, (inputs[0][:2], inputs[0][:2, :1])], criterion
    )
    require(not model.with_gradients, "validation-keeps-graphs", "gradients were enabled")
    parts = [*batches, (inputs[0][:2], inputs[0][:2, :1])]
    total = sum(float(criterion(model(one), other)) * len(one) for one, other in parts)
    compare(mean, total / 22, "validate_frugally of 10, 10 and 2 samples")


def _reference(
    batches: list[tuple[torch.Tensor, torch.Tensor]], *, zero_grad: bool = True, parts: int = 10
) -> tuple[torch.Tensor, list[float]]:
    """Train with plain means over ``parts`` samples, equally weighted."""
    model = _Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches:
        if zero_grad:
            optimizer.zero_grad()
        pieces = list(zip(inputs.split(parts), targets.split(parts), strict=True))
        means = [nn.functional.mse_loss(model(one), other) for one, other in pieces]
        loss = sum(means[1:], means[0]) / len(means)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return model.layer.weight.detach(), losses


def frequency(bench: Bench) -> None:
    """The fastest that fits."""
    cost = bench.code.Cost
    costs = {1: cost(1.4, 300), 2: cost(1.3, 400), 4: cost(1.25, 700), 8: cost(1.0, 1200)}
    given = bench.code.best_frequency(costs, 800)
    require(given != 8, "over-budget", "it chose one of 1200 bytes for a budget of 800")
    require(given != 1, "least-memory-not-fastest", "it chose 1.4 s where 1.25 s fits")
    require(given == 4, "wrong-value", f"from {costs} within 800 bytes it chose {given}")
    try:
        given = bench.code.best_frequency(costs, 100)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        mistake("nothing-fits", f"{type(error).__name__}: {error}")
    require(given is None, "wrong-value", f"within 100 bytes it chose {given}")


CHECKS = {
    "checkpointing": checkpointing,
    "attention": attention,
    "frugality": frugality,
    "frequency": frequency,
}
