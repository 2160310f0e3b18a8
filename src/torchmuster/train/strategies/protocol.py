"""What every way of spreading a model over the ranks can do. This is the whole surface."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from torchmuster.train.strategies.gradients import Measured


class Strategy(Protocol):
    """Spreads a model over the ranks.

    Gradients after a backward with communication are the *mean* over the ranks, in every strategy, so
    that :class:`torchmuster.train.update.Update` can weigh them alike.
    """

    @property
    def name(self) -> str:
        """What people write in settings: single, ddp or fsdp."""
        ...

    def prepare(self, model: nn.Module) -> nn.Module:
        """Place, wrap or shard a model; the result is what is called and what is optimised.

        All ranks start with the values of rank 0. Fsdp also takes a model that has values on rank 0 only
        (``meta_init.py``).
        """
        ...

    def rehearse(self, model: nn.Module, compute: Callable[[], None]) -> None:
        """Before the first step of a run that goes on: be as a model is that has made steps already.

        ``compute`` is a forward and backward of that step, of which nothing may remain.
        """
        ...

    def begin_step(self, model: nn.Module) -> None:
        """Before a step's first forward: give all ranks those buffers of rank 0 that training changes.

        Rank 0's are saved, so a run that goes on has them on all ranks; one that never stopped must too.
        """
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave out every communication of gradients: each rank has its own, whole."""
        ...

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around all micro-batches of a step but the last: communicate only what saves memory."""
        ...

    def check_gradients(self, model: nn.Module) -> None:
        """After the first backward with communication: raise if a parameter's gradient never comes."""
        ...

    def measure_gradients(self, parameters: Sequence[nn.Parameter], *, norm: bool) -> Measured:
        """Find out on the device whether all gradients on all ranks are finite, and their 2-norm if asked.

        The same on every rank, in plain tensors. The host does not wait for the device.
        """
        ...

    def state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Return ``{"model": …, "optimizer": …}`` under the model's own names; sharded stays sharded."""
        ...

    def load_state_dict(
        self,
        model: nn.Module,
        state: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Take back what :meth:`state_dict` gave, or a whole state of the same names.

        A whole state may be there on every rank, or on rank 0 alone, with ``{}`` on the others.
        """
        ...
