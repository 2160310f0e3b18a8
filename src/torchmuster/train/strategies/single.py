"""Strategy for one process and one device: nothing is distributed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from torchmuster.train.strategies import placing, strategy
from torchmuster.train.strategies.placing import place_model
from torchmuster.train.world import World


class Single:
    """Moves the model to the rank's device, and nothing else."""

    name = "single"

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device."""
        return place_model(model, self._world.device)

    def rehearse(self, model: nn.Module, compute: Callable[[], None]) -> None:
        """Do nothing: a model is the same in every step."""

    def begin_step(self, model: nn.Module) -> None:
        """Do nothing: there is one rank."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: there is no other rank."""
        return nullcontext()

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: there is no other rank."""
        return nullcontext()

    def check_gradients(self, model: nn.Module) -> None:
        """Do nothing: parameters without a gradient stay unchanged, and no rank waits for them."""

    def measure_gradients(
        self, parameters: Sequence[nn.Parameter], *, norm: bool
    ) -> strategy.GradientNorm:
        """Measure all gradients."""
        return strategy.measure_gradients(parameters, self._world.device, norm=norm)

    def state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Return the state under the model's own names."""
        return placing.training_state_dict(model, optimizer)

    def load_state_dict(
        self,
        model: nn.Module,
        state: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Restore a state."""
        placing.load_training_state_dict(model, state, optimizer, self._world)
