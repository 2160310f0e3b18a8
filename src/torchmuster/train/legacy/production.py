"""``ProductionTrainer``: DDP with mixed precision, accumulation, a schedule, checkpoints and curves."""

import difflib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchmuster.errors import Impossible
from torchmuster.train import random_states
from torchmuster.train.agreement import tell_all
from torchmuster.train.data.foreign import ForeignLoader
from torchmuster.train.data.nested import placed
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.evaluate import evaluate
from torchmuster.train.legacy import epoch as one_epoch
from torchmuster.train.legacy import states, together
from torchmuster.train.legacy.board import Board
from torchmuster.train.legacy.epoch import Criterion, LossSum
from torchmuster.train.legacy.presence import present_world
from torchmuster.train.precision import cards, choose
from torchmuster.train.schedules import Shape, schedule
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.protocol import Strategy
from torchmuster.train.strategies.single import Single
from torchmuster.train.update import Update
from torchmuster.train.world import World

_log = logging.getLogger(__name__)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class ProductionConfig:
    """What a :class:`ProductionTrainer` is to do."""

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

    ``config`` is a :class:`ProductionConfig` or a dictionary of its fields. Form the group first
    (``setup_distributed``); without one, one process trains alone::

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
        config = config if isinstance(config, ProductionConfig) else _read(config)
        self.config = config
        self._world = world = present_world()
        self._strategy: Strategy = Ddp(world) if world.backend else Single(world)
        self.model = self._strategy.prepare(model)
        self.precision = choose(config.precision, cards(world))
        if isinstance(config.criterion, nn.Module):
            config.criterion.to(world.device)  # weights of classes
        self._loader = ForeignLoader(train_loader, world, accumulation=config.accumulation)
        self._val_loader = val_loader
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = (config.optimizer or _adamw(config))(parameters)
        steps = self._loader.steps_in_epoch()
        self.scheduler = schedule(
            self.optimizer,
            config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=None if steps is None else steps * config.epochs,
        )
        self._update = Update(
            self.model,
            self.optimizer,
            self._strategy,
            world,
            precision=self.precision.value,
            clip_norm=config.clip_norm,
            schedule=self.scheduler,
        )
        folder = config.tensorboard_folder
        self._board = Board(None if folder is None else Path(folder), world)
        self._steps = 0  # since the beginning of the run
        self._losses = LossSum()  # since the last point of the curve

    def train_epoch(self, epoch: int) -> float:
        """Train on every batch once; return the mean loss over all samples of all ranks."""
        began = time.perf_counter()
        before = self._steps
        mean = one_epoch.train(
            self.model,
            self._loader.epoch(epoch),
            self.config.criterion,
            self._update,
            self._world,
            precision=self.precision.value,
            on_step=self._note,
        )
        steps_per_s = (self._steps - before) / (time.perf_counter() - began)
        self._board.write(
            {"train/loss of the epoch": mean, "train/steps_per_s": steps_per_s}, self._steps
        )
        self._board.write_gpus(self._steps)
        return mean

    def validate(self) -> dict[str, float]:
        """Return the mean loss, and for classes the accuracy, over all validation samples of all ranks.

        It is what one process would find; ranks may have different numbers of batches.
        """
        if self._val_loader is None:
            raise Impossible(
                "there is nothing to validate with", fix="give ProductionTrainer a val_loader"
            )
        found = evaluate(
            states.bare(self.model),
            _steps_of(self._val_loader, self._world),
            self._measure,
            self._world,
            precision=self.precision.value,
        )
        self._board.write({f"validation/{name}": one for name, one in found.items()}, self._steps)
        return found

    def save_checkpoint(self, epoch: int) -> Path:
        """Let rank 0 write everything to one file in the checkpoint folder, and wait; return its path."""
        path = Path(self.config.checkpoint_folder) / f"epoch-{epoch:04d}.safetensors"
        tree = {
            "epoch": epoch,
            "step": self._steps,
            "model": states.of_model(self.model),
            "optimizer": states.of_optimizer(self.optimizer, self.model),
            "schedule": self.scheduler.state_dict(),
            "update": self._update.state(),
            "random": tell_all(random_states.keep(self._world), self._world),
        }
        together.write(path, tree, self._world)
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Go on from a file of ``save_checkpoint``; return its epoch, so the next one is that + 1.

        On as many ranks as it was saved by, all that follows is what would have followed without a stop.
        """
        saved = together.read(Path(path), self._world)
        states.put_back(saved, self.model, self.optimizer, Path(path))
        self.scheduler.load_state_dict(saved["schedule"])
        self._update.restore(saved["update"])
        self._steps = int(saved["step"])
        self._losses = LossSum()
        kept = saved["random"]
        if len(kept) == self._world.world_size:
            random_states.put_back(kept[self._world.global_rank], self._world)
        elif self._world.is_first:
            _log.warning(
                "%s was saved by %d ranks, and there are %d: random numbers (dropout) go on anew",
                path,
                len(kept),
                self._world.world_size,
            )
        return int(saved["epoch"])

    def close(self) -> None:
        """Write what is left of the curves."""
        self._board.close()

    def _note(self, losses: LossSum) -> None:
        self._steps += 1
        self._losses.take_over(losses)
        if self._steps % self.config.log_every == 0:
            self._board.write(
                {
                    "train/loss": self._losses.mean(self._world),
                    "train/learning_rate": float(self.scheduler.get_last_lr()[0]),
                },
                self._steps,
            )
            self._losses = LossSum()

    def _measure(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = one_epoch.inputs_and_targets(batch)
        output = model(*inputs)
        loss, count = one_epoch.loss_and_count(self.config.criterion, output, targets)
        if count is None:
            loss, count = loss * len(targets), len(targets)
        found = {"loss": (loss, count)}
        if targets.ndim == 1 and output.ndim == 2 and not targets.is_floating_point():
            found["accuracy"] = ((output.argmax(1) == targets).sum(), len(targets))
        return found


def _steps_of(dataloader: DataLoader[Any], world: World) -> Iterator[Step]:
    """Yield each batch as a step; ranks may have different numbers, since nothing is communicated."""
    for number, batch in enumerate(dataloader):
        _, targets = one_epoch.inputs_and_targets(batch)
        micro = MicroBatch(batch=placed(batch, world.device), samples=len(targets))
        yield Step(
            epoch=0,
            number=number,
            rounds=1,
            samples=None,
            nominal_samples=len(targets),
            micro_batches=[micro],
        )


def _adamw(config: ProductionConfig) -> MakeOptimizer:
    return lambda parameters: torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay
    )


def _read(config: Mapping[str, Any]) -> ProductionConfig:
    known = [one.name for one in fields(ProductionConfig)]
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise Impossible(
                f"ProductionTrainer has no setting {name!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}",
            )
    if "epochs" not in config:
        raise Impossible(
            "the setting 'epochs' is missing",
            why="the learning rate's schedule ends with the last epoch",
            fix="give ProductionTrainer {'epochs': …}",
        )
    return ProductionConfig(**config)
