"""Optimizer steps with scheduled rates, half precision and losses of two kinds."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rank_programs.small_models import Layers, data, portion, seeded_model, step_of, strategy_of
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.optimizers import schedule
from torchmuster.train.precision import FP16, FP32
from torchmuster.train.step import StepResult, TrainStep
from torchmuster.train.world import World, all_gather_object

COUNTED = 5  # samples of a step whose loss is counted: on 3 ranks with 2 micro-batches one is idle


def learning_rates(world: World, rounds: int) -> list[float]:
    """The rate of each of 8 steps, of which the third is bad and changes nothing."""
    strategy = strategy_of("ddp", world)
    model = strategy.prepare(seeded_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = schedule(optimizer, "cosine", warmup_steps=2, total_steps=7)
    update = TrainStep(model, optimizer, strategy, world, schedule=curve)
    rates = []
    for number in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        spoilt = float("nan") if number == 2 and world.is_first else 1.0
        _one_step(update, model, portion(12, world, rounds), 12, spoilt)
    return rates


def _one_step(
    update: TrainStep,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    samples: int,
    factor: float,
) -> StepResult:
    for micro in update.accumulate(step_of(micro_batches, samples)):
        inputs, targets = micro.batch
        update.backward(nn.functional.mse_loss(model(inputs), targets) * factor)
    return update.apply()


def overflowing(world: World, name: str) -> dict[str, Any]:
    """Train in fp16 with a scale that overflows at first: on the last rank only, where shards allow it."""
    strategy = strategy_of(name, world)
    model = strategy.prepare(seeded_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    update = TrainStep(
        model, optimizer, strategy, world, precision=FP16, clip_norm=1.0, scaler=scaler
    )
    inputs, targets = data(8)
    losses, outcomes, scales = [], [], []
    for _ in range(30):
        for micro in update.accumulate(step_of(portion(8, world), 8)):
            with FP16.autocast(world.device):
                loss = nn.functional.mse_loss(model(micro.batch[0]).float(), micro.batch[1])
            update.backward(loss)
        outcomes.append(update.apply())
        scales.append(scaler.get_scale())
    with torch.no_grad():
        losses.append(float(nn.functional.mse_loss(model(inputs).float(), targets)))
    return {
        "applied": [one.applied for one in outcomes],
        "overflowed": [one.overflowed for one in outcomes],
        "scales": scales,
        "finite_norms": all(one.norm is not None and one.norm < 100 for one in outcomes[-5:]),
        "loss": losses[0],
        "digest": _whole_sum(model),
    }


def _whole_sum(model: nn.Module) -> float:
    return sum(
        float((one.full_tensor() if isinstance(one, DTensor) else one).double().sum())
        for one in model.parameters()
    )


def an_overflow_in_one_shard(world: World) -> list[bool]:
    """Put Inf in one rank's shard alone; say what each step's outcome is, then weights' finiteness."""
    strategy = strategy_of("fsdp", world)
    model = strategy.prepare(seeded_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    update = TrainStep(model, optimizer, strategy, world, precision=FP16, scaler=scaler)
    answers = []
    for spoil in (True, False):
        for micro in update.accumulate(step_of(portion(8, world), 8)):
            update.backward(nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))
        if spoil and world.global_rank == 1:
            gradient = next(one.grad for one in model.parameters() if one.grad is not None)
            assert isinstance(gradient, DTensor)
            gradient.to_local().flatten()[0] = float("inf")
        answers.append(update.apply().applied)
    said = all_gather_object([*answers, scaler.get_scale() == 2.0], world)
    assert all(one == said[0] for one in said)
    return list(said[0])


def weights_after_counted_steps(world: World, name: str, clip_norm: float | None) -> list[float]:
    """Train 3 steps on totals and counts."""
    strategy = strategy_of(name, world)
    model = strategy.prepare(seeded_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = TrainStep(model, optimizer, strategy, world, precision=FP32, clip_norm=clip_norm)
    for number in range(3):
        for micro in update.accumulate(step_of(portion(COUNTED, world, rounds=2), None, number)):
            loss, count = counted_loss(model, micro.batch)
            update.backward(loss, count)
        outcome = update.apply()
        assert outcome.applied
    return flat_weights(model)


def counted_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second sample of the dataset counts, found by its target: see ``data``."""
    inputs, targets = batch
    every_second = torch.isin(targets, data(COUNTED)[1][::2])
    errors = (model(inputs) - targets) ** 2
    return (errors * every_second).sum(), every_second.sum()


def flat_weights(model: nn.Module) -> list[float]:
    whole = [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().flatten()
        for one in model.parameters()
    ]
    return [float(one) for one in torch.cat(whole).tolist()]


def plain_weights_after_counted_steps(clip_norm: float | None) -> list[float]:
    """The same in plain PyTorch, one process, one batch: nothing of ours but the data."""
    model: Layers = seeded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = data(COUNTED)
    for _ in range(3):
        optimizer.zero_grad()
        total, count = counted_loss(model, batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return flat_weights(model)
