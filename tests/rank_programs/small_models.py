"""A small model, and steps for it: what programs about one optimizer step need."""

from collections.abc import Sequence

import torch
from torch import nn

from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.fsdp import Fsdp
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World

FEATURES = 6


class Layers(nn.Module):
    """A few named layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.leave = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(inputs))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return torch.as_tensor(self.leave(hidden)).sum(-1)


def seeded_model() -> Layers:
    torch.manual_seed(7)
    return Layers()


def data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs, torch.randn(size, generator=generator)


def strategy_of(name: str, world: World) -> Strategy:
    return Ddp(world) if name == "ddp" else Fsdp(world)


def step_of(micro_batches: Sequence[MicroBatch], samples: int | None, number: int = 0) -> Step:
    """Return a step of what is given; its size is that of all ranks, or not known."""
    return Step(
        epoch=0,
        number=number,
        rounds=len(micro_batches),
        samples=samples,
        nominal_samples=samples or 8,
        micro_batches=micro_batches,
    )


def portion(size: int, world: World, rounds: int = 1) -> list[MicroBatch]:
    """Return this rank's samples of a global batch, as uneven as they come; idle where none is left."""
    inputs, targets = data(size)
    cells = torch.arange(size).tensor_split(world.world_size * rounds)
    chosen = cells[world.global_rank * rounds : (world.global_rank + 1) * rounds]
    return [
        MicroBatch(
            batch=(inputs[own if len(own) else [0]], targets[own if len(own) else [0]]),
            samples=len(own),
            indices=own.tolist(),
        )
        for own in chosen
    ]
