"""``DDPTrainer``: the trainer that DDP's introductions write, without their pitfalls."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchmuster.train.data.foreign import ForeignLoader
from torchmuster.train.legacy import epoch, states, together
from torchmuster.train.legacy.epoch import Criterion
from torchmuster.train.legacy.presence import present_world
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.protocol import Strategy
from torchmuster.train.strategies.single import Single
from torchmuster.train.update import Update


class DDPTrainer:
    """Trains a model with a copy on every rank. All ranks call every method.

    ``model`` is what is called and what an optimiser is made from: DDP around the model that was given,
    moved to this rank's device. Form the group first (``setup_distributed``); without one, one process
    trains alone.
    """

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        self._world = present_world(rank, world_size)
        alone = not self._world.backend
        self._strategy: Strategy = Single(self._world) if alone else Ddp(self._world)
        self.model = self._strategy.prepare(model)
        self._epoch = 0  # of the next pass over the data

    def train_epoch(
        self, dataloader: DataLoader[Any], optimizer: torch.optim.Optimizer, criterion: Criterion
    ) -> float:
        """Train on every batch once; return the mean loss over all samples of all ranks.

        Every sample counts the same, also where last batches differ in size. The sampler is told the
        epoch. Ranks with different numbers of batches are named, instead of waiting for ever.
        """
        self._epoch = _epoch_set_by_hand(dataloader, self._epoch)
        loader = ForeignLoader(dataloader, self._world)
        update = Update(self.model, optimizer, self._strategy, self._world)
        if isinstance(criterion, nn.Module):
            criterion.to(self._world.device)  # weights of classes
        steps = loader.epoch(self._epoch)
        mean = epoch.train(self.model, steps, criterion, update, self._world)
        self._epoch += 1
        return mean

    def save_checkpoint(
        self, path: str | os.PathLike[str], epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let rank 0 write one file, and wait for it: afterwards any rank may read it.

        It holds the model under its own names, the optimiser and the epoch, and no pickle. It replaces an
        older one only when it is whole.
        """
        tree = {
            "epoch": epoch,
            "model": states.of_model(self.model),
            "optimizer": states.of_optimizer(optimizer, self.model),
        }
        together.write(Path(path), tree, self._world)

    def load_checkpoint(
        self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
    ) -> int:
        """Let rank 0 read a file of ``save_checkpoint`` and give it to all; return its epoch.

        Any number of ranks may load it. The next ``train_epoch`` is the epoch after it.
        """
        saved = together.read(Path(path), self._world)
        states.put_back(saved, self.model, optimizer, Path(path))
        self._epoch = int(saved["epoch"]) + 1
        return int(saved["epoch"])


def _epoch_set_by_hand(dataloader: DataLoader[Any], counted: int) -> int:
    """Return the epoch that a script has set at the sampler itself, if it did; else the counted one."""
    told = getattr(dataloader.sampler, "epoch", counted)
    return told if isinstance(told, int) and told > counted else counted
