"""DDP: every rank has the whole model; gradients are averaged while the backward still runs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmuster.train import seeds
from torchmuster.train.buffers import untrained
from torchmuster.train.strategies import placing, strategy, unused_parameters
from torchmuster.train.strategies.placing import place_model
from torchmuster.train.world import World


class Ddp:
    """Wraps the model in torch's DistributedDataParallel.

    ``find_unused_parameters`` searches the graph after every forward for parameters that will have
    no gradient, so that the ranks do not wait for them.
    """

    name = "ddp"

    def __init__(self, world: World, *, find_unused_parameters: bool = False) -> None:
        self._world = world
        self._find_unused_parameters = find_unused_parameters

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and wrap it; DDP broadcasts the values of rank 0."""
        device = self._world.device
        return DistributedDataParallel(
            place_model(model, device),
            device_ids=None if device.type == "cpu" else [device],
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused_parameters,
        )

    def rehearse(self, model: nn.Module, compute: Callable[[], None]) -> None:
        """Run a backward whose only effect is DDP's order of gradients.

        DDP rebuilds its buckets after its first backward, in the order in which gradients arrived.
        A gradient's position in a bucket decides in which order the ranks' values are summed, and
        so its last digit: a resumed run must start with the second order, like an uninterrupted
        run. With ``find_unused_parameters``, DDP keeps its first order.
        """
        if self._find_unused_parameters:
            return
        kept = [(one, one.detach().clone()) for one in untrained(model)]
        states = seeds.save_random_states(self._world)
        compute()
        seeds.load_random_states(states, self._world)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for one, value in kept:
                one.copy_(value)

    def begin_step(self, model: nn.Module) -> None:
        """Do nothing: DDP broadcasts rank 0's buffers itself."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not communicate this backward's gradients."""
        return cast(DistributedDataParallel, model).no_sync()

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not communicate this backward's gradients: every rank has memory for them anyway."""
        return self.no_sync(model)

    def check_gradients(self, model: nn.Module) -> None:
        """Raise with the names of parameters for which the ranks would wait forever."""
        if not self._find_unused_parameters:
            wrapped = cast(DistributedDataParallel, model)
            unused_parameters.refuse_unused_parameters(wrapped.module, self._world)

    def measure_gradients(
        self, parameters: Sequence[nn.Parameter], *, norm: bool
    ) -> strategy.GradientNorm:
        """Measure all gradients, which are the same on every rank.

        Gradients are measured one by one. Measuring DDP's buckets would be faster, but buckets
        differ in a run's first step, so a resumed run would differ in the norm's last digit.
        """
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
