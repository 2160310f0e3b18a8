"""DDP: every rank has the whole model; gradients are averaged while the backward still runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmuster.train.buffers import no_effect
from torchmuster.train.strategies import unused_parameters
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World


class Ddp(Strategy):
    """Wraps the model in torch's DistributedDataParallel.

    ``find_unused_parameters`` searches the graph after every forward for parameters that will have
    no gradient, so that the ranks do not wait for them.
    """

    name = "ddp"

    def __init__(self, world: World, *, find_unused_parameters: bool = False) -> None:
        super().__init__(world)
        self._find_unused_parameters = find_unused_parameters

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and wrap it; DDP broadcasts the values of rank 0."""
        device = self._world.device
        return DistributedDataParallel(
            self.place(model),
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
        if not self._find_unused_parameters:
            with no_effect(model, self._world):
                compute()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not communicate this backward's gradients."""
        return cast(DistributedDataParallel, model).no_sync()

    def check_gradients(self, model: nn.Module) -> None:
        """Raise with the names of parameters for which the ranks would wait forever."""
        if not self._find_unused_parameters:
            wrapped = cast(DistributedDataParallel, model)
            unused_parameters.refuse_unused_parameters(wrapped.module)
