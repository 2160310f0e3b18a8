"""Trains two deliberately unstable small models in each precision, and records the result."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchmuster.bench.stability import Case, Course
from torchmuster.train.bad_numbers import BackwardNanHooks, ForwardNanHooks
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.precision import PRECISIONS, Precision
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.single import Single
from torchmuster.train.world import World

_SAMPLES, _FEATURES, _WIDTH, _CLASSES = 64, 16, 64, 4
_TARGET_SIZE = 100.0  # of the targets: gradients times the initial loss scale exceed 65504
_GROWTH_PER_LAYER, _LAYERS = 8.0, 6  # 8 ** 6 exceeds 65504
_GROW_SCALE_AFTER = 10  # steps; GradScaler's default of 2000 would never be reached
_LEARNING_RATE = 1e-2


class LargeLosses(nn.Module):
    """A network with large targets, so that its losses and gradients are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_FEATURES, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one number for each sample."""
        foretold: torch.Tensor = self.layers(inputs)
        return foretold


class LargeActivations(nn.Module):
    """Layers without normalization, each of which scales its inputs up several times."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [_FEATURES, *[_WIDTH] * _LAYERS]
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(sizes)
        )
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=_GROWTH_PER_LAYER * math.sqrt(2 / layer.in_features))
        self.last = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        for layer in self.layers:
            inputs = torch.relu(layer(inputs))
        logits: torch.Tensor = self.last(inputs)
        return logits


def study_stability(world: World, precisions: Sequence[str], steps: int) -> tuple[Course, ...]:
    """Train both models in these precisions, for ``steps`` steps each."""
    return tuple(
        _course(case, PRECISIONS[name], world, steps)
        for case in ("large losses", "large activations")
        for name in precisions
    )


def _course(case: Case, precision: Precision, world: World, steps: int) -> Course:
    device = world.device
    torch.manual_seed(0)
    model: nn.Module = LargeLosses() if case == "large losses" else LargeActivations()
    strategy = Single(world)
    model = strategy.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    scaler = torch.amp.GradScaler(device.type, growth_interval=_GROW_SCALE_AFTER)
    update = TrainStep(model, optimizer, strategy, world, precision=precision, scaler=scaler)
    batch = tuple(one.to(device) for one in _stability_data(case))
    losses: list[float | None] = []
    scales: list[float] = []
    skipped: list[int] = []
    culprit: dict[str, Any] = {}

    def loss_of() -> torch.Tensor:
        with precision.autocast(device):
            return _stability_loss(case, model(batch[0]), batch[1])

    for number in range(steps):
        for _ in update.accumulate(_stability_step(number, batch)):
            loss = loss_of()
            value = loss.item()
            losses.append(value if math.isfinite(value) else None)
            update.backward(loss)
        scale = scaler.get_scale() if precision.needs_scaler else 1.0
        applied = update.apply().applied
        if not applied:
            skipped.append(number)
            culprit = culprit or _culprit(model, loss_of, scale)
            optimizer.zero_grad()
        if precision.needs_scaler:
            scales.append(scaler.get_scale())
    return Course(
        case=case,
        precision=precision.name,
        losses=tuple(losses),
        scales=tuple(scales),
        skipped=tuple(skipped),
        **culprit,
    )


def _stability_data(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(1)
    inputs = torch.randn(_SAMPLES, _FEATURES, generator=maker)
    if case == "large losses":
        return inputs, _TARGET_SIZE * inputs[:, :1]
    return inputs, inputs[:, :_CLASSES].argmax(1)


def _stability_loss(case: Case, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if case == "large losses":
        return nn.functional.mse_loss(output.float(), targets)
    return nn.functional.cross_entropy(output.float(), targets)


def _stability_step(number: int, batch: Any) -> Step:
    micro = MicroBatch(batch=batch, samples=_SAMPLES)
    return Step(
        epoch=0,
        number=number,
        rounds=1,
        samples=_SAMPLES,
        nominal_samples=_SAMPLES,
        micro_batches=[micro],
    )


def _culprit(model: nn.Module, loss_of: Callable[[], torch.Tensor], scale: float) -> dict[str, Any]:
    """Repeat a bad step, and return the first non-finite tensor."""
    with torch.no_grad(), ForwardNanHooks(model) as forward:
        loss_of()
    if forward.culprit is not None:
        found, in_forward = forward.culprit, True
    else:
        with BackwardNanHooks(model) as backward:
            (loss_of() * scale).backward()  # type: ignore[no-untyped-call]
        if backward.culprit is None:
            return {}
        found, in_forward = backward.culprit, False
    return {"culprit": found["what"], "kind": found["kind"], "in_forward": in_forward}
