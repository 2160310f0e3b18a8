"""What ranks keep in memory when a model is sharded."""

import torch
from torch import nn

from live_bytes import live_bytes
from rank_programs.small_models import step_of
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.models.meta_init import build_on_rank_0
from torchmuster.train.out_of_memory import memory_table
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.choose import build_strategy
from torchmuster.train.strategies.sharding import Kind, Sharding
from torchmuster.train.world import World

WIDTH, BLOCKS, SAMPLES = 256, 24, 16


class Block(nn.Module):
    """Parameters of WIDTH * WIDTH; keeps its input and its result for the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def build_model(width: int = WIDTH, blocks: int = BLOCKS) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def train_sharded(world: World, kind: Kind) -> dict[str, int]:
    """Return what was live at most, in bytes, and what the memory table says."""
    with live_bytes() as found:
        strategy = build_strategy("fsdp", world, sharding=Sharding(kind=kind))
        model = strategy.prepare(build_on_rank_0(build_model, world, seed=0))
        values_peak = found.peak
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        update = TrainStep(model, optimizer, strategy, world)

        _backward(model, update, world)  # makes the optimizer's states
        update.apply()
        kept = found.live
        found.begin_again()
        _backward(model, update, world)
        update.apply()
        step_peak = found.peak
        _backward(model, update, world)
    table = memory_table(list(model.parameters()), optimizer, world.device)
    return {
        "values_peak": values_peak,
        "kept": kept,
        "step_peak": step_peak,
        "parameters": table["parameters"],
        "gradients": table["gradients"],
        "optimizer": table["optimizer states"],
    }


def _backward(
    model: nn.Module, update: TrainStep, world: World, width: int = WIDTH
) -> torch.Tensor:
    """Compute the gradients of a step and return its loss."""
    micro = MicroBatch(batch=torch.ones(SAMPLES, width), samples=SAMPLES)
    losses: list[torch.Tensor] = []
    for given in update.accumulate(step_of([micro], SAMPLES * world.world_size)):
        loss = (model(given.batch) - 1).square().mean()
        update.backward(loss)
        losses.append(loss.detach())
    return losses[-1]
