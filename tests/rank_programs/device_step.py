"""Steps whose fate the device decides: what the host reads, and what comes out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from host_reads import HostReads, host_reads
from rank_programs.small_models import data, portion, seeded_model, step_of
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.optimizers import MakeOptimizer, optimizer_named
from torchmuster.train.precision import BF16, FP16, FP32, Precision
from torchmuster.train.reports import Reports
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.choose import Name, build_strategy
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.trainer import Trainer
from torchmuster.train.world import World

SAMPLES = 8
STEPS = 8  # the first line comes after step 1, the second after the last one
PRECISIONS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


@dataclass
class Ready:
    """Gives the same step again and again, without anything to read."""

    micro_batches: Sequence[MicroBatch]

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        for number in range(STEPS):
            yield step_of(self.micro_batches, SAMPLES, number)

    def steps_in_epoch(self) -> int:
        return STEPS

    def state(self) -> dict[str, Any]:
        return {"epoch": 0}

    def restore(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class TwoLines(Reports):
    """Reports after the first step and the last one, however long the steps take."""

    def next_line(self, step: int, step_s: float) -> int:
        return STEPS


def strategy_named(name: str, world: World, precision: Precision = FP32) -> Strategy:
    if name == "hybrid":
        sharding = Sharding(kind="hybrid_shard", shard_size=2)
        return build_strategy("fsdp", world, precision=precision, sharding=sharding)
    return build_strategy(cast(Name, name), world, precision=precision)


def reads(world: World, name: str, optimizer: str) -> dict[str, list[tuple[int, str]]]:
    """What the host reads between two lines, for all precisions and losses, with clipping and without."""
    found = {}
    for kind, precision in PRECISIONS.items():
        for clip_norm in (None, 0.05):
            for counts in (False, True):
                seen = _trained(world, name, optimizer, precision, clip_norm, counts)
                words = [kind, "clipped" if clip_norm else "", "tokens" if counts else "samples"]
                found[" ".join(filter(None, words))] = seen.in_steps(2, STEPS - 1)
                assert seen.in_steps(1, 1), "the first line reads"
    return found


def _trained(
    world: World,
    name: str,
    optimizer: str,
    precision: Precision,
    clip_norm: float | None,
    counts: bool,
) -> HostReads:
    def loss(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        each = (model(inputs).float() - targets).square()
        return (each.sum(), torch.ones_like(each).sum()) if counts else each.mean()

    with host_reads() as seen:
        Trainer(
            world=world,
            model=seeded_model(),
            loss=loss,
            optimizer=_optimizer(optimizer),
            data=Ready(portion(SAMPLES, world, rounds=2)),
            strategy=strategy_named(name, world, precision),
            precision=precision,
            clip_norm=clip_norm,
            reports=TwoLines(world, quiet=True),
        ).fit(steps=STEPS)
    return seen


def _optimizer(name: str) -> MakeOptimizer:
    if name == "not fused":
        return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return optimizer_named(
        "sgd" if name == "sgd" else "adamw", learning_rate=0.01, weight_decay=0.1
    )


def copies(world: World, name: str) -> list[tuple[int, int]]:
    """In which step the host was sent the fate of a step, and in which it looked."""
    return _trained(world, name, "adamw", FP32, None, False).copies


def with_a_bad_step(
    world: World, name: str, optimizer: str, clip_norm: float | None, bad: int
) -> list[float]:
    """The weights after 6 steps, of which one has a gradient that is not finite on the last rank."""
    strategy = strategy_named(name, world)
    model = strategy.prepare(seeded_model())
    made = _optimizer(optimizer)(list(model.parameters()))
    update = TrainStep(model, made, strategy, world, clip_norm=clip_norm)
    applied = []
    for number in range(6):
        spoilt = number == bad and world.global_rank == world.world_size - 1
        for micro in update.accumulate(step_of(portion(SAMPLES, world), SAMPLES)):
            inputs, targets = micro.batch
            loss = (model(inputs) - targets).square().mean() * (number + 1)
            update.backward(loss * float("nan") if spoilt else loss)
        applied.append(update.apply())
    assert [one.applied for one in applied] == [number != bad for number in range(6)]
    state = strategy.state_dict(model)["model"]
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state.values()]
    return [number for one in whole for number in one.flatten().tolist()]


def plain_weights(optimizer: str, clip_norm: float | None, bad: int) -> list[float]:
    """What a loop of plain torch gives in one process, where the bad step is left out."""
    model = seeded_model()
    made: torch.optim.Optimizer
    if optimizer == "sgd":
        made = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    else:
        made = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    inputs, targets = data(SAMPLES)
    for number in range(6):
        if number == bad:
            continue
        made.zero_grad()
        torch.autograd.backward((model(inputs) - targets).square().mean() * (number + 1))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
    return [number for one in model.state_dict().values() for number in one.flatten().tolist()]
