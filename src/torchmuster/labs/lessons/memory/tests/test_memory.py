"""The tests of the lab memory: pytest tests/, or muster lab check."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchmuster.labs.testing import (
    Mistake,
    Operations,
    Submission,
    compare,
    exercise,
    is_close,
    require,
    without,
)

_LAYERS, _EVERY, _LENGTH = 7, 3, 48
_BF16 = 0.01  # two to three digits
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _layers(dropout: float) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)) for _ in range(_LAYERS)]


def _gradients(model: nn.Module, layers: list[nn.Module]) -> torch.Tensor:
    torch.manual_seed(2)
    output = model(torch.ones(3, 4))
    if not output.requires_grad:
        raise Mistake(
            "reentrant-loses-gradients",
            "the output does not require gradients: backward stops there",
        )
    output.pow(2).sum().backward()
    given: list[torch.Tensor | None] = []
    for layer in layers:
        given += [parameter.grad for parameter in layer.parameters()]
    lost = [gradient for gradient in given if gradient is None]
    require(not lost, "reentrant-loses-gradients", f"{len(lost)} parameters have no gradient")
    return torch.cat([gradient.flatten() for gradient in given if gradient is not None])


@exercise
def test_checkpointing(submission: Submission) -> None:
    """Equal gradients from recomputed layers."""
    warnings.simplefilter("ignore")  # torch warns about the mistakes recognized here
    for dropout, otherwise in ((0.0, "wrong-value"), (0.5, "dropout-differs")):
        plain = _layers(dropout)
        expected = _gradients(nn.Sequential(*plain), plain)
        layers = _layers(dropout)
        calls = [0] * _LAYERS
        for place, layer in enumerate(layers):
            layer.register_forward_hook(_counting(calls, place))
        stack = submission.code.CheckpointedStack(layers, _EVERY)
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


@exercise
def test_attention(submission: Submission) -> None:
    """The outputs of plain attention, without the score matrix."""
    torch.manual_seed(3)
    inputs = [torch.randn(1, 2, _LENGTH, 8) for _ in range(3)]
    queries, keys, values = inputs
    squares = [0]

    def count_squares(_: str, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.shape[-2:] == (_LENGTH, _LENGTH):
            squares[0] += 1

    for causal in (False, True):
        with Operations(count_squares):
            given = submission.code.attention(queries, keys, values, causal)
        known = {
            "attention-not-scaled": _plain(*inputs, causal=causal, scale=1.0),
            "not-causal": _plain(*inputs, causal=False, scale=8**-0.5),
        }
        what = f"attention(…, causal={causal})"
        compare(given, _plain(*inputs, causal=causal, scale=8**-0.5), what, known)
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
    """A layer that records how it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)
        self.sizes: list[int] = []
        self.with_gradients = False
        self.dtype = torch.float32

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(inputs))
        self.with_gradients = self.with_gradients or torch.is_grad_enabled()
        result: torch.Tensor = self.layer(inputs)
        self.dtype = result.dtype
        return result


@exercise
def test_frugality(submission: Submission) -> None:
    """Micro-batches, the same step, 16 bits, recomputed layers, no graphs kept."""
    inputs = torch.randn(2, 10, 2, generator=torch.Generator().manual_seed(4))
    batches = [(batch, batch.sum(1, keepdim=True)) for batch in inputs]
    criterion = nn.MSELoss()
    model = _Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = submission.code.train_frugally([model], batches, criterion, optimizer, 4)
    held = any(isinstance(loss, torch.Tensor) for loss in losses)
    require(not held, "losses-keep-graphs", "the losses are tensors")
    largest = max(model.sizes)
    seen = f"{largest} samples went through the model at once, not 4"
    require(largest <= 4, "whole-batch-at-once", seen)
    require(
        model.dtype == torch.bfloat16, "activations-in-32-bits", f"forward ran in {model.dtype}"
    )
    seen = f"{len(model.sizes)} forwards for 6 parts: none in backward"
    require(len(model.sizes) > 6, "activations-stored", seen)
    expected, expected_losses = _reference(batches)
    known = {
        "gradients-pile-up": _reference(batches, zero_grad=False)[0],
        "parts-not-weighted": _reference(batches, is_weighted=False)[0],
    }
    what = "the weights after parts of 4, 4 and 2 samples"
    compare(model.layer.weight, expected, what, known, rtol=_BF16)
    compare(losses, expected_losses, "the losses", rtol=_BF16)
    _check_validation(submission, batches, criterion)


def _check_validation(submission: Submission, batches: Batches, criterion: nn.Module) -> None:
    model = _Watched()
    inputs = batches[0][0][:2]
    parts = [*batches, (inputs, inputs[:, :1])]
    mean = submission.code.validate_frugally(model, parts, criterion)
    require(not model.with_gradients, "validation-keeps-graphs", "gradients were enabled")
    total = 0.0
    for values, targets in parts:
        total += float(criterion(model(values), targets)) * len(values)
    compare(mean, total / 22, "validate_frugally of 10, 10 and 2 samples")


def _reference(
    batches: Batches, *, zero_grad: bool = True, is_weighted: bool = True
) -> tuple[torch.Tensor, list[float]]:
    """Train in bfloat16 on parts of 4, 4 and 2 samples."""
    model = _Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches:
        if zero_grad:
            optimizer.zero_grad()
        total = 0.0
        for part, expected in zip(inputs.split(4), targets.split(4), strict=True):
            weight = 1 / 3
            if is_weighted:
                weight = len(part) / len(inputs)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(part), expected) * weight
            loss.backward()
            total += float(loss)
        optimizer.step()
        losses.append(total)
    return model.layer.weight.detach(), losses


@exercise
def test_frequency(submission: Submission) -> None:
    """The fastest that fits."""
    cost = submission.code.Cost
    costs = {1: cost(1.4, 300), 2: cost(1.3, 400), 4: cost(1.25, 700), 8: cost(1.0, 1200)}
    given = submission.code.best_frequency(costs, 800)
    known = {"over-budget": 8, "least-memory-not-fastest": 1}
    compare(given, 4, f"best_frequency of {costs} within 800 bytes", known)
    with without("nothing-fits", ValueError, TypeError, KeyError, IndexError):
        given = submission.code.best_frequency(costs, 100)
    compare(given, None, "best_frequency within 100 bytes")
