"""``Trainer``: the training loop, built from the parts of this package.

The same parts work in a hand-written loop; ``Trainer`` adds their order and the printed step
lines::

    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        dataset,
        batch_size=64,
        strategy="fsdp",
        precision="bf16",
        checkpoints="runs/first",
    )
    trainer.resume()
    trainer.fit(epochs=3)
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.finding import render
from torchmuster.train import arguments
from torchmuster.train.banner import banner
from torchmuster.train.data.step import Loader, Step
from torchmuster.train.models.meta_init import build_for
from torchmuster.train.out_of_memory import oom_report
from torchmuster.train.precision import Precision
from torchmuster.train.progress import progress
from torchmuster.train.reports import Reports
from torchmuster.train.step import StepResult, TrainStep
from torchmuster.train.step_line import StepRecord
from torchmuster.train.step_log import StepLog
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World

if TYPE_CHECKING:  # imported only by runs that use them
    from torchmuster.train.bad_numbers import BadNumbers
    from torchmuster.train.checkpointing.checkpointer import Loaded
    from torchmuster.train.checkpointing.saves import CheckpointSettings, Saves
    from torchmuster.train.evaluate import BestLoss, Measure
    from torchmuster.train.losses import Loss


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What to evaluate on which data: every N steps, or after every epoch.

    With ``CheckpointSettings(keep_best=True)`` the checkpoint with the lowest measured ``loss`` is kept.
    """

    loader: Loader
    measure: "Measure"
    every: int | None = None


class Trainer:
    """Trains a model: loads data, computes, updates, and reports progress."""

    def __init__(
        self,
        model: arguments.Model,
        loss: "Loss | nn.Module | str",
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
        data: Any,
        *,
        world: World | None = None,
        batch_size: int | None = None,
        parameter_groups: arguments.ParameterGroups | None = None,
        strategy: Decision[Strategy] | Strategy | str = "auto",
        precision: Decision[Precision] | Precision | str = "auto",
        clip_norm: float | None = None,
        schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        evaluation: Evaluation | None = None,
        checkpoints: "CheckpointSettings | Path | str | None" = None,
        reports: Reports | None = None,
        seed: int = 0,
        flops_of_batch: Callable[[Any], float] | None = None,
        peak_flop_s: float | None = None,
    ) -> None:
        """Build the model and the optimizer; nothing is trained yet.

        - ``model``: a module, or a function that returns one. It is called with torch's generator seeded
          by ``seed``; for fsdp, only rank 0's model has memory for its parameters before it is sharded.
        - ``loss``: a function of the model and a batch that returns the mean over the samples, or a sum and
          the number of items; a criterion of outputs and targets, for batches of pairs; or the name of
          one of ``torchmuster.train.losses``.
        - ``optimizer``: an optimizer, its class, or a function. A class or function is called with the list of
          trained parameters, or with the groups that ``parameter_groups`` returns for the model.
        - ``data``: a ``DataLoader``, whose batches are used unchanged; a dataset, of which a step uses
          ``batch_size`` samples over all ranks; or a loader such as ``BatchLoader``.
        - ``world``: that of ``join_world``; if there is none, this process joins until it ends.
        - ``strategy``: auto, single, ddp, fsdp, or a strategy. ``precision``: auto, fp32, bf16, fp16.
        - ``checkpoints``: a folder or URL, saved to every 10 minutes and at the end, or settings.
        - ``schedule`` is called with the optimizer. ``clip_norm`` is the max gradient norm.
        - ``reports`` prints step lines and writes metrics files. ``flops_of_batch`` returns the FLOPs of
          training on a batch, without waiting for the device: step lines then have the rate, and with
          ``peak_flop_s``, the peak rate of this rank's device in the precision, the utilization.
        """
        model = arguments.choose_model(model)
        make_optimizer = arguments.choose_optimizer(optimizer, model, parameter_groups)
        saving = arguments.choose_checkpoints(checkpoints)
        world = arguments.choose_world(world)
        self.loss = arguments.choose_loss(loss, world)
        loader = arguments.choose_loader(data, world, batch_size=batch_size, seed=seed)
        self.world = world
        self.loader = loader
        self._evaluation = evaluation
        self._every = evaluation.every if evaluation is not None else None
        self._saving = saving
        self.best: BestLoss | None = None  # with CheckpointSettings(keep_best=True)
        self.seed = seed
        self.precision = arguments.choose_precision(precision, world)
        self._autocast = self.precision.value.autocast(world.device)
        self.strategy = arguments.choose_strategy(strategy, self.precision.value, model, world)
        with oom_report(world):
            if not isinstance(model, nn.Module):  # for fsdp, only rank 0's model gets values
                model = build_for(self.strategy.value.name, model, world, seed=seed)
        arguments.check_trained(model)
        with oom_report(world, model):
            self.model = self.strategy.value.prepare(model)
        self.optimizer = make_optimizer(self.model)
        self.schedule = schedule(self.optimizer) if schedule is not None else None
        self._update = TrainStep(
            self.model,
            self.optimizer,
            self.strategy.value,
            world,
            precision=self.precision.value,
            clip_norm=clip_norm,
            schedule=self.schedule,
        )
        self._bad_numbers: BadNumbers | None = None  # made at the first bad step
        self.reports = reports or Reports(world)
        self.epoch = 0
        self.step = 0  # optimizer steps so far, over all epochs
        self._position: dict[str, Any] | None = None  # of the loader, in an unfinished epoch
        self.evaluated = 0  # the step of the last evaluation
        self._goes_on = False  # resumed from another process's checkpoint
        self.log = StepLog(
            world,
            self.reports,
            model=self.model,
            workers=getattr(loader, "workers", None),  # not every loader has workers
            flops_of_batch=flops_of_batch,
            peak_flop_s=peak_flop_s,
            loss_scale=self._update.loss_scale,
        )
        self._introduced = False
        # The last step's number, epoch and result, which the host has not read yet.
        self._last_result: tuple[int, int, StepResult] | None = None

    def fit(self, *, epochs: int | None = None, steps: int | None = None) -> StepRecord | None:
        """Train until a total of N epochs or steps is done; return the last record.

        Each step: load, accumulate, backward, apply, log, evaluate, save, stop.
        """
        if epochs is None and steps is None:
            raise Impossible("fit() needs epochs or steps", fix="give epochs=… or steps=…")
        self.model.train()
        with self._running(epochs, steps) as saves:
            while not self._is_done(epochs, steps):
                with closing(self._load()) as loaded:  # a loader may have running processes
                    self.log.wait()
                    for step in loaded:
                        self._train_step(step)
                        is_best = False
                        if self._every is not None and self.step % self._every == 0:
                            is_best = self._evaluate()
                        self._after_step(saves, is_best=is_best)
                        if self._is_done(epochs, steps):
                            break
                        self.log.wait()
                    position = self.loader.state()
                    # Not every loader knows in advance which step is the last one of its epoch.
                    is_over = next(loaded, None) is None
                if not is_over:
                    self._position = position
                    break
                is_best = False
                if self._evaluation and self._every is None and self.evaluated < self.step:
                    is_best = self._evaluate()
                self.epoch += 1
                if is_best:
                    self._after_step(saves, is_best=True)
            self._explain_skipped_step()
            self.log.finish(self.step)
        return self.log.last_record

    def _is_done(self, epochs: int | None, steps: int | None) -> bool:
        if steps is not None and self.step >= steps:
            return True
        return epochs is not None and self.epoch >= epochs

    def _load(self) -> Generator[Step, None, None]:
        """Yield the steps of this epoch, from the restored position on."""
        if self._position is not None:
            self.loader.restore(self._position)
        may_be_empty = self._position is not None  # a run may have stopped at its epoch's end
        self._position = None
        with closing(cast(Any, self.loader.epoch(self.epoch))) as steps:
            for step in steps:
                may_be_empty = True
                progress.step = self.step + 1
                if self._goes_on:
                    self._goes_on = False
                    step = self._rehearsed(step)  # with the same micro-batches
                yield step
        if not may_be_empty:
            raise Impossible(
                f"the loader yielded no step in epoch {self.epoch}",
                fix="check what loader.epoch(…) yields",
            )

    def _loss_of(self, batch: Any) -> tuple[torch.Tensor, int | torch.Tensor | None]:
        with self._autocast:
            result = self.loss(self.model, batch)
        return result if isinstance(result, tuple) else (result, None)

    def _rehearsed(self, step: Step) -> Step:
        """Compute the first micro-batch once without effect; return the full step."""
        micro_batches = iter(step)
        first = next(micro_batches)

        def compute() -> None:
            loss, _ = self._loss_of(first.batch)
            loss.backward()  # type: ignore[no-untyped-call]

        self.strategy.value.rehearse(self.model, compute)
        return replace(step, micro_batches=chain([first], micro_batches))

    def _train_step(self, step: Step) -> None:
        """Compute the gradients of a step, update the weights, and report."""
        for micro in self._update.accumulate(step):
            self.log.work()
            loss, count = self._loss_of(micro.batch)
            self._update.backward(loss, count)
            self.log.add(micro, loss, count)
            self.log.wait()
        rate = self.optimizer.param_groups[0]["lr"]  # before a schedule changes it
        result = self._update.apply()
        self.log.end_step(
            result.found_inf, epoch=step.epoch, learning_rate=float(rate), norm=result.norm
        )
        self._explain_skipped_step()
        self.step += 1
        self._last_result = (self.step, step.epoch, result)
        self.log.report(self.step)

    def _explain_skipped_step(self) -> None:
        """Find the cause if the last step was skipped.

        Called one step later, when the host can read the result without stalling the device.
        """
        if self._last_result is None:
            return
        (number, epoch, result), self._last_result = self._last_result, None
        if not result.applied and not result.overflowed:
            if self._bad_numbers is None:
                from torchmuster.train import bad_numbers

                self._bad_numbers = bad_numbers.BadNumbers(
                    self.model, self.world, precision=self.precision.value
                )
            finding = self._bad_numbers.examine(
                number, result.micro_batches, self.loss, epoch=epoch
            )
            self.reports.say(render([finding]))

    def _evaluate(self) -> bool:
        """Evaluate; return whether the loss is the lowest so far, and its checkpoint is to be kept."""
        from torchmuster.train import evaluate

        assert self._evaluation is not None
        self.log.flush()  # keeps the lines in order
        with self.log.spending("evaluating"):
            numbers = evaluate.evaluate(
                self.model,
                self._evaluation.loader,
                self._evaluation.measure,
                self.world,
                self.precision.value,
            )
        self.evaluated = self.step
        self.reports.evaluation(self.step, self.epoch, numbers)
        if self._saving is None or not self._saving.keep_best:
            return False
        best = evaluate.best_loss(numbers, self.step, self.best)
        self.best = best or self.best
        return best is not None

    def _after_step(self, saves: "Saves | None", *, is_best: bool) -> None:
        if saves is not None:
            best = self.best.loss if is_best and self.best is not None else None
            saves.after_step(self.log.elapsed_s, best=best)

    @contextmanager
    def _running(self, epochs: int | None, steps: int | None) -> "Iterator[Saves | None]":
        """Report, save, and explain a lack of memory, during one call of :meth:`fit`."""
        ends = [] if steps is None else [steps]
        steps_in_epoch = self.loader.steps_in_epoch()
        if epochs is not None and steps_in_epoch is not None:
            ends.append(epochs * steps_in_epoch)
        self.reports.last_step = min(ends, default=None)
        if not self._introduced:
            self._introduced = True
            self.reports.say(self._banner())
        saving: AbstractContextManager[Saves | None] = nullcontext()
        if self._saving is not None:
            saving = self._saves(self._saving)
        self.log.begin()
        size = arguments.micro_batch_size(self.loader)
        try:
            with (
                oom_report(self.world, self.model, self.optimizer, micro_batch_size=size),
                saving as saves,
            ):
                yield saves
        finally:
            progress.step, progress.phase = None, ""

    def _saves(self, settings: "CheckpointSettings") -> "Saves":
        from torchmuster.train.checkpointing import saves

        return saves.Saves(self, settings)

    def _banner(self) -> str:
        return banner(
            self.world,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            strategy=self.strategy.reason,
            precision=self.precision.reason,
        )

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume: tensors, and plain JSON types.

        All ranks call it; sharded tensors stay sharded.
        """
        self._explain_skipped_step()
        self.log.flush()  # a resumed run begins its lines after this step
        tensors = self.strategy.value.state_dict(self.model, self.optimizer)
        return {
            **tensors,
            "progress": {
                "step": self.step,
                "evaluated": self.evaluated,
                "loader": self._position or self.loader.state(),
                "update": self._update.state(),
                "schedule": None if self.schedule is None else self.schedule.state_dict(),
                "best": None if self.best is None else [self.best.loss, self.best.step],
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned, even on another number of ranks."""
        saved = state["progress"]
        self._last_result = None
        if (self.schedule is None) != (saved["schedule"] is None):
            raise Impossible(
                "only one of the checkpoint and this run has a learning-rate schedule",
                why="the learning rates would differ from here on",
                fix="use the same schedule, or start a new run",
            )
        self.strategy.value.load_state_dict(self.model, state, self.optimizer)
        self.step = saved["step"]
        self.evaluated = saved["evaluated"]
        self.log.resume_at(self.step)
        self.loader.restore(saved["loader"])
        self.epoch = saved["loader"]["epoch"]
        self._position = saved["loader"]
        self._update.restore(saved["update"])
        if self.schedule is not None:
            self.schedule.load_state_dict(saved["schedule"])
        if saved["best"] is not None:
            from torchmuster.train import evaluate

            self.best = evaluate.BestLoss(*saved["best"])
        self._goes_on = self.step > 0

    def resume(self) -> "Loaded | None":
        """Resume from the newest good checkpoint of ``checkpoints``, of any number of ranks.

        Return what was loaded; None if there is no checkpoint and training starts from scratch.
        Metrics of later steps are deleted, because these steps are repeated.
        """
        if self._saving is None:
            raise Impossible(
                "resume() needs a place of checkpoints",
                fix="give Trainer(checkpoints=…), a folder",
            )
        loaded = self._saves(self._saving).resume()
        if loaded is not None and "base" not in loaded.state:
            # It has the frozen weights, which may differ from the base model's files of today.
            self._saving = replace(self._saving, base=None)
        return loaded
