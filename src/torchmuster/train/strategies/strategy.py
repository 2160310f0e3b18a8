"""The base of all strategies: what one process on one device does. Others replace parts of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from torchmuster.train.models.meta_init import is_on_meta
from torchmuster.train.strategies import gradients
from torchmuster.train.strategies.gradients import GradientNorm
from torchmuster.train.strategies.states import (
    load_training_state_dict,
    training_state_dict,
    without_values,
)
from torchmuster.train.world import World


class Strategy:
    """Distributes a model over the ranks.

    Gradients after a backward with communication are the *mean* over the ranks, in every strategy, so
    that :class:`torchmuster.train.step.TrainStep` can weight them identically.
    """

    name: str  # in settings: single, ddp or fsdp

    def __init__(self, world: World) -> None:
        self._world = world

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the rank's device."""
        if is_on_meta(model):
            raise without_values()
        return model.to(self._world.device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move, wrap or shard a model; call and optimize the result.

        All ranks start with the values of rank 0. Fsdp also takes a model that has values on rank 0 only
        (``meta_init.py``).
        """
        return self.place(model)

    def rehearse(self, model: nn.Module, compute: Callable[[], None]) -> None:
        """Before the first step of a resumed run: bring the model into the state after some steps.

        ``compute`` is a forward and backward of that step, which must leave no effect.
        """

    def begin_step(self, model: nn.Module) -> None:
        """Before a step's first forward: broadcast rank 0's buffers that training changes.

        Rank 0's are saved, so a resumed run has them on all ranks; an uninterrupted run must have
        them too. DDP does it itself.
        """

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Skip all communication of gradients: each rank keeps its own full gradients."""
        return nullcontext()

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around all micro-batches of a step except the last: communicate only to save memory."""
        return self.no_sync(model)

    def check_gradients(self, model: nn.Module) -> None:
        """After the first backward with communication: raise if a parameter got no gradient.

        Only DDP ranks would wait for it.
        """

    def measure_gradients(self, parameters: Sequence[nn.Parameter], *, norm: bool) -> GradientNorm:
        """Check on the device that all gradients are finite; compute the 2-norm if requested.

        The results are the same on every rank, as plain tensors. The host does not wait for the
        device.
        """
        return gradients.measure_gradients(parameters, self._world.device, norm=norm)

    def state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Return ``{"model": …, "optimizer": …}``, by the model's own names; shards stay sharded."""
        return training_state_dict(model, optimizer)

    def load_state_dict(
        self,
        model: nn.Module,
        state: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Restore what :meth:`state_dict` returned, or a full state with the same names on every rank."""
        load_training_state_dict(model, state, optimizer)
