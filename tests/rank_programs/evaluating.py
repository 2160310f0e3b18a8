"""Evaluation of datasets of every small size."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from rank_programs.small_models import data, portion, seeded_model, step_of, strategy_of
from torchmuster.errors import MusterError
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.evaluate import evaluate
from torchmuster.train.world import World

SIZES = range(1, 18)
# By the strategy, the global size and that of a micro-batch: many small steps, and one for all.
BATCHES = {"ddp": (5, 1), "fsdp": (64, None)}


def measure(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Values of both kinds: one for each sample, and sums with counts."""
    inputs, targets = batch
    given = model(inputs)
    near = (given - targets).abs() < 1
    return {
        "loss": ((given - targets) ** 2),
        "near": near,
        "of the positive": (near[targets > 0].sum(), (targets > 0).sum()),
    }


def one_process(size: int) -> dict[str, float]:
    """The same in plain PyTorch."""
    inputs, targets = data(size)
    with torch.no_grad():
        given = seeded_model()(inputs)
    near, positive = (given - targets).abs() < 1, targets > 0
    return {
        "loss": float(((given - targets) ** 2).double().mean()),
        "near": float(near.double().mean()),
        "of the positive": float(near[positive].double().mean()) if positive.any() else math.nan,
    }


Answers = list[dict[str, float]]


def every_size(world: World) -> dict[str, Answers]:
    """Evaluate 1 to 17 samples, shuffled and spread over the ranks."""
    return {name: _every_size(world, name) for name in BATCHES}


def _every_size(world: World, name: str) -> Answers:
    model = strategy_of(name, world).prepare(nn.Sequential(nn.Dropout(0.5), seeded_model()))
    model.train()
    frozen = next(one for one in model.modules() if isinstance(one, nn.Linear))
    frozen.eval()
    global_batch_size, micro_batch_size = BATCHES[name]
    answers = []
    for size in SIZES:
        loader = BatchLoader(
            TensorDataset(*data(size)),
            world,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        )
        answers.append(evaluate(model, loader, measure, world))
    assert model.training
    assert not frozen.training
    assert all(one.grad is None for one in model.parameters())
    return answers


def own_statistics(world: World) -> dict[str, dict[str, float]]:
    """Evaluate the samples 1 to 4 with running statistics that differ over the ranks."""

    def spoilt() -> nn.Module:
        model = strategy_of(name, world).prepare(nn.Sequential(nn.BatchNorm1d(1)))
        if name == "fsdp":  # gloo, and so DDP, does not know this type
            model.register_buffer("kind", torch.zeros(2, dtype=torch.int16))
        for buffer in model.buffers():
            buffer += world.global_rank
        return model

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.as_tensor(model(batch))[:, 0]

    own = [2 * world.global_rank, 2 * world.global_rank + 1]
    batch = torch.tensor([[float(one + 1)] for one in own])
    steps = [step_of([MicroBatch(batch=batch, samples=2, indices=own)], 4)]
    answers = {}
    for name in ("ddp", "fsdp"):
        answers[name] = evaluate(spoilt(), steps, lambda *both: {"value": forward(*both)}, world)
    return answers


def refusal(world: World) -> str:
    """What is wrong with a measure, in words."""
    steps = [step_of(portion(5, world, rounds=3), None)]
    try:
        evaluate(seeded_model(), steps, lambda model, batch: {"a": torch.tensor(1.0)}, world)
    except MusterError as error:
        return str(error)
    return ""
