"""``ProductionTrainer``: DDP with mixed precision, accumulation, a schedule, checkpoints and curves."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchmuster.devices import snapshot
from torchmuster.devices.as_json import device_numbers
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.train import seeds
from torchmuster.train.criterion import (
    Criterion,
    inputs_and_targets,
    loss_and_count,
    loss_of_pairs,
)
from torchmuster.train.data.dataloader_adapter import DataLoaderAdapter
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.evaluate import evaluate
from torchmuster.train.legacy import checkpoint_file
from torchmuster.train.legacy.data import present_world
from torchmuster.train.optimizers import Shape, schedule
from torchmuster.train.precision import FP32, Precision, choose_precision
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.single import Single
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import (
    World,
    all_gather_object,
    most_exact_type,
    sum_over_ranks,
)

_log = logging.getLogger(__name__)

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def strategy_of(world: World) -> Strategy:
    """Return DDP in a process group, else a single process."""
    return Ddp(world) if world.backend else Single(world)


def mean_of(sums: torch.Tensor, world: World) -> float:
    """Return the mean of a loss from its total and count, over all ranks (a collective)."""
    total, count = sum_over_ranks(sums.tolist(), world)
    return total / count if count else float("nan")


def no_sums(world: World) -> torch.Tensor:
    """Return a total and a count of 0, on the device."""
    return torch.zeros(2, dtype=most_exact_type(world.device), device=world.device)


def train_steps(
    model: nn.Module,
    steps: Iterable[Step],
    criterion: Criterion,
    update: TrainStep,
    world: World,
    *,
    precision: Precision = FP32,
) -> Iterator[torch.Tensor]:
    """Train; yield the total and the count of each step's losses on this rank, 0 for a skipped step.

    Nothing waits for the device.
    """
    model.train()
    loss_of = loss_of_pairs(criterion, world.device)
    done = 0
    skipped: torch.Tensor | float = 0.0
    for step in steps:
        sums = no_sums(world)
        for micro in update.accumulate(step):
            with precision.autocast(world.device):
                result = loss_of(model, micro.batch)
            loss, count = result if isinstance(result, tuple) else (result, None)
            update.backward(loss, count)
            if micro.samples:
                if count is None:
                    loss, count = loss * micro.samples, micro.samples
                sums[0] += loss.detach()
                sums[1] += count
        result_of_step = update.apply()
        skipped = skipped + result_of_step.found_inf
        done += 1
        yield sums.where(result_of_step.found_inf == 0, 0)
    if number := int(skipped):
        _log.warning("%d of %d steps were skipped: their gradients were not finite", number, done)


class DDPTrainer:
    """Trains a model with a copy on every rank. All ranks call every method.

    Call ``model``, and create the optimizer from it: it is the given model wrapped in DDP, on this
    rank's device. Initialize the process group first (``setup_distributed``); without one, a single
    process trains alone.
    """

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        self._world = present_world(rank, world_size)
        self._strategy = strategy_of(self._world)
        self.model = self._strategy.prepare(model)
        self._epoch = 0  # of the next pass over the data

    def train_epoch(
        self, dataloader: DataLoader[Any], optimizer: torch.optim.Optimizer, criterion: Criterion
    ) -> float:
        """Train on every batch once; return the mean loss over all samples of all ranks.

        Every sample has the same weight, even if last batches differ in size. This method calls
        ``set_epoch`` on the sampler. If ranks have different numbers of batches, it raises an error
        that names them.
        """
        # A script that calls set_epoch itself is believed.
        self._epoch = max(self._epoch, getattr(dataloader.sampler, "epoch", 0))
        steps = DataLoaderAdapter(dataloader, self._world).epoch(self._epoch)
        update = TrainStep(self.model, optimizer, self._strategy, self._world)
        whole = no_sums(self._world)
        for sums in train_steps(self.model, steps, criterion, update, self._world):
            whole += sums
        self._epoch += 1
        return mean_of(whole, self._world)

    def save_checkpoint(
        self, path: str | os.PathLike[str], epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Write one file on rank 0, and wait for it: afterwards any rank may read it.

        A ``torch.save`` file with the model under its own names, the optimizer and the epoch. It
        replaces an older file only when it is complete.
        """
        tree = {"epoch": epoch, **checkpoint_file.states_of(self.model, optimizer)}
        checkpoint_file.save_together(Path(path), tree, self._world)

    def load_checkpoint(
        self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
    ) -> int:
        """Read a file of ``save_checkpoint``, on each rank; return its epoch.

        Any number of ranks may load it. The next ``train_epoch`` is the epoch after it.
        """
        saved = checkpoint_file.read_file(Path(path))
        checkpoint_file.load_states(saved, self.model, optimizer, Path(path))
        self._epoch = int(saved["epoch"]) + 1
        return int(saved["epoch"])


@dataclass(frozen=True, kw_only=True)
class ProductionConfig:
    """The settings of a :class:`ProductionTrainer`."""

    epochs: int  # of the whole run: the schedule ends with the last
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    optimizer: MakeOptimizer | None = None  # instead of AdamW with the two above
    schedule: Shape = "cosine"
    warmup_steps: int = 0
    accumulation: int = 1  # batches of a rank that make one step
    clip_norm: float | None = 1.0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    criterion: Criterion = field(default_factory=nn.CrossEntropyLoss)
    checkpoint_folder: str | os.PathLike[str] = "checkpoints"
    tensorboard_folder: str | os.PathLike[str] | None = None
    log_every: int = 50  # steps between points of a curve


class ProductionTrainer:
    """Trains with a copy of the model on every rank. All ranks call every method.

    ``config`` is a :class:`ProductionConfig` or a dictionary of its fields. Initialize the process
    group first (``setup_distributed``); without one, a single process trains alone::

        trainer = ProductionTrainer(model, train_loader, val_loader, {"epochs": 10})
        for epoch in range(10):
            trainer.train_epoch(epoch)
            trainer.validate()
            trainer.save_checkpoint(epoch)
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: DataLoader[Any],
        val_loader: DataLoader[Any] | None,
        config: ProductionConfig | Mapping[str, Any],
    ) -> None:
        if not isinstance(config, ProductionConfig):
            config = ProductionConfig(**config)
        self.config = config
        self._world = world = present_world()
        strategy = strategy_of(world)
        self.model = strategy.prepare(model)
        self.precision = choose_precision(config.precision, world)
        self._loader = DataLoaderAdapter(train_loader, world, accumulation=config.accumulation)
        self._val_loader = val_loader
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if config.optimizer is None:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                parameters, lr=config.learning_rate, weight_decay=config.weight_decay
            )
        else:
            self.optimizer = config.optimizer(parameters)
        steps = self._loader.steps_in_epoch()
        self.scheduler = schedule(
            self.optimizer,
            config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=None if steps is None else steps * config.epochs,
        )
        self._update = TrainStep(
            self.model,
            self.optimizer,
            strategy,
            world,
            precision=self.precision.value,
            clip_norm=config.clip_norm,
            schedule=self.scheduler,
        )
        self._steps = 0  # since the beginning of the run
        self._writer: Any = None
        if config.tensorboard_folder is not None and world.is_first:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(config.tensorboard_folder)

    def train_epoch(self, epoch: int) -> float:
        """Train on every batch once; return the mean loss over all samples of all ranks."""
        world = self._world
        whole, recent = no_sums(world), no_sums(world)
        for sums in train_steps(
            self.model,
            self._loader.epoch(epoch),
            self.config.criterion,
            self._update,
            world,
            precision=self.precision.value,
        ):
            whole += sums
            recent += sums
            self._steps += 1
            if self._steps % self.config.log_every == 0:
                rate = float(self.scheduler.get_last_lr()[0])
                self._write({"train/loss": mean_of(recent, world), "train/learning_rate": rate})
                recent.zero_()
        mean = mean_of(whole, world)
        self._write({"train/loss of the epoch": mean})
        if self._writer is not None:
            for device in visible(snapshot.take_snapshot().accelerators, os.environ).devices:
                self._write(device_numbers(device))
        return mean

    def validate(self) -> dict[str, float]:
        """Return the mean loss, and for classes the accuracy, over all validation samples of all ranks.

        The result is the same as in a single process; ranks may have different numbers of batches.
        """
        if self._val_loader is None:
            raise Impossible(
                "validate() needs a val_loader", fix="give ProductionTrainer a val_loader"
            )
        found = evaluate(
            checkpoint_file.unwrap_model(self.model),
            _steps_of(self._val_loader, self._world),
            self._measure,
            self._world,
            precision=self.precision.value,
        )
        self._write({f"validation/{name}": value for name, value in found.items()})
        return found

    def save_checkpoint(self, epoch: int) -> Path:
        """Write everything to one file on rank 0, and wait for it; return its path."""
        path = Path(self.config.checkpoint_folder) / f"epoch-{epoch:04d}.pt"
        tree = {
            "epoch": epoch,
            "step": self._steps,
            **checkpoint_file.states_of(self.model, self.optimizer),
            "schedule": self.scheduler.state_dict(),
            "update": self._update.state(),
            "random": all_gather_object(seeds.save_random_states(self._world), self._world),
        }
        checkpoint_file.save_together(path, tree, self._world)
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Resume from a file of ``save_checkpoint``; return its epoch; the next epoch is one higher.

        With the same number of ranks, training continues exactly as without an interruption.
        """
        saved = checkpoint_file.read_file(Path(path))
        checkpoint_file.load_states(saved, self.model, self.optimizer, Path(path))
        self.scheduler.load_state_dict(saved["schedule"])
        self._update.restore(saved["update"])
        self._steps = int(saved["step"])
        states = saved["random"]
        if len(states) == self._world.world_size:
            seeds.load_random_states(states[self._world.global_rank], self._world)
        elif self._world.is_first:
            _log.warning(
                "%s was saved by %d ranks, but there are %d now: random numbers (dropout) are reseeded",
                path,
                len(states),
                self._world.world_size,
            )
        return int(saved["epoch"])

    def close(self) -> None:
        """Flush the curves."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, numbers: Mapping[str, float]) -> None:
        """Add a point to each of these curves; on rank 0, with a ``tensorboard_folder``."""
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, self._steps)

    def _measure(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = inputs_and_targets(batch)
        output = model(*inputs)
        loss, count = loss_and_count(self.config.criterion, output, targets)
        if count is None:
            loss, count = loss * len(targets), len(targets)
        found = {"loss": (loss, count)}
        if targets.ndim == 1 and output.ndim == 2 and not targets.is_floating_point():
            found["accuracy"] = ((output.argmax(1) == targets).sum(), len(targets))
        return found


def _steps_of(dataloader: DataLoader[Any], world: World) -> Iterator[Step]:
    """Yield each batch as a step; ranks may have different numbers of steps."""
    for number, batch in enumerate(dataloader):
        _, targets = inputs_and_targets(batch)
        micro = MicroBatch(batch=move_to_device(batch, world.device), samples=len(targets))
        yield Step(
            epoch=0,
            number=number,
            rounds=1,
            samples=None,
            nominal_samples=len(targets),
            micro_batches=[micro],
        )
