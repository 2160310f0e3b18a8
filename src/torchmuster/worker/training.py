"""Train from settings: build the parts, resume from a checkpoint, train, and write the weights."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from torchmuster.checkpoints.export import ExportRequest, run_exporter
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.config.settings import Settings, Train
from torchmuster.config.training import (
    checkpoint_place,
    saves_checkpoints,
    warmup_steps_of,
)
from torchmuster.errors import Impossible, MusterError
from torchmuster.runfolder import RunFolder
from torchmuster.train import losses, optimizers, precision
from torchmuster.train.checkpointing.saves import CheckpointSettings
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.step import Loader
from torchmuster.train.models import factory, lora
from torchmuster.train.models.factory import ModelRecipe
from torchmuster.train.out_of_memory import oom_report
from torchmuster.train.progress import progress
from torchmuster.train.reports import Reports
from torchmuster.train.seeds import seed_everything
from torchmuster.train.stop_request import StopRequest
from torchmuster.train.trainer import Trainer
from torchmuster.train.weights import compare_hashes, save_weights
from torchmuster.train.world import World, all_gather_object, rank_zero_first
from torchmuster.units import parse_seconds, plural
from torchmuster.worker.data import (
    TextData,
    batches_of,
    describe_mixed_gpus,
    evaluation_of,
    samples_of,
    text_of,
)
from torchmuster.worker.model import base_of, model_of, recipe_of, write_model_files
from torchmuster.worker.reporting import (
    flops_of_batch,
    peak_flops,
    rank_zero_log,
    start_sinks,
)

# All ranks wait for this check, and they hold GPUs.
_NAMES_WITHIN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trainer, and what else writing its weights needs."""

    trainer: Trainer
    recipe: ModelRecipe
    text: TextData | None  # None: the data is not text
    stop: StopRequest | None  # None: nothing is saved, so there is nothing to stop for


def train_from_settings(settings: Settings, world: World, folder: Path) -> None:
    """Build everything that the settings describe, train, and write the weights to the folder.

    A run with checkpoints is resumed. A stop request takes effect once everything is built:
    before that there is nothing to save.
    """
    training = build_trainer(settings, world, folder)
    trainer, text = training.trainer, training.text
    run = RunFolder(folder)
    tokenizer = None if text is None else text.format.tokenizer
    write_model_files(run.model, training.recipe, tokenizer, trainer.model, world)
    place = run.checkpoints / "final"
    with start_sinks(settings, world, folder):
        with training.stop or nullcontext():
            if training.stop is not None:
                trainer.resume()
            first_step = trainer.step
            record = trainer.fit(epochs=_epochs(settings), steps=settings.train.steps)
        _save(trainer, training.recipe, place, beside=run.model)
    if trainer.step == first_step:
        rank_zero_log(world, f"already finished: nothing left to train after step {first_step}")
    result = f"trained {trainer.step} steps"
    if record is not None and record.loss is not None:
        result += f", loss {record.loss:.4g}"
    rank_zero_log(world, f"{result}; the weights are in {place}")
    if settings.checkpoint.keep_best and trainer.best is not None:
        rank_zero_log(
            world,
            f"best loss {trainer.best.loss:.4g} after step {trainer.best.step}; to export it: "
            f"muster checkpoint export {folder.name} best --to FOLDER",
        )


def build_trainer(settings: Settings, world: World, folder: Path) -> Training:
    """Build the trainer that the settings describe; all ranks call it. Nothing is trained yet."""
    with oom_report(world):
        with rank_zero_first(world, per="node"):  # one rank downloads the model for its host
            recipe = recipe_of(settings)
        text = text_of(settings, world, recipe)
        seed_everything(settings.train.seed, world)
        stop, saving = None, None
        if saves_checkpoints(settings.checkpoint):
            stop = StopRequest(world)
            saving = _saving(settings, folder, stop)
        batches = batches_of(
            settings, world, resumed=None if saving is None else _resumed_batch_size(saving, world)
        )
        mixed_gpus = _mixed_gpus(world)
        if mixed_gpus is not None:
            rank_zero_log(world, mixed_gpus)
        samples = samples_of(settings, text, recipe, world)
        loader = loader_for(samples, world, **batches)
        computed = precision.choose_precision(settings.train.precision, world)
        model, strategy = model_of(settings, recipe, text, computed.value, world)
        if saving is not None:
            saving = replace(saving, base=base_of(recipe, model, world))
        loss = _training_loss(settings, recipe, text)
        trainer = Trainer(
            world=world,
            model=model,
            loss=loss,
            optimizer=_optimizer(settings.train),
            parameter_groups=lambda model: optimizers.parameter_groups(
                model,
                learning_rate=settings.train.learning_rate,
                weight_decay=settings.train.weight_decay,
            ),
            data=loader,
            strategy=strategy,
            precision=computed,
            clip_norm=settings.train.clip_norm,
            schedule=_schedule(settings, loader),
            evaluation=evaluation_of(settings, text, recipe, batches, loss, world),
            checkpoints=saving,
            reports=Reports(world, folder=folder, log_every=settings.train.log_every),
            seed=settings.train.seed,
            flops_of_batch=None if text is None else flops_of_batch(model),
            peak_flop_s=peak_flops(world.device, model, computed.value.compute),
        )
    return Training(trainer=trainer, recipe=recipe, text=text, stop=stop)


def _mixed_gpus(world: World) -> str | None:
    """Return a note on the smallest GPU if the ranks' GPUs differ; all ranks call it."""
    if world.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(world.device)
    gpus = all_gather_object([gpu.name, gpu.total_memory], world)
    return describe_mixed_gpus([(name, memory_bytes) for name, memory_bytes in gpus])


def _saving(settings: Settings, folder: Path, stop: StopRequest) -> CheckpointSettings:
    wanted = settings.checkpoint
    every = wanted.every
    place = checkpoint_place(wanted, folder.resolve())
    assert place is not None, "called only if checkpoints are enabled"
    return CheckpointSettings(
        to=place,
        every=every if isinstance(every, int) else None,
        every_s=None if isinstance(every, int) else parse_seconds(every),
        keep=wanted.keep,
        keep_best=wanted.keep_best,
        stop=stop,
    )


def _resumed_batch_size(saving: CheckpointSettings, world: World) -> int | None:
    """Return the global batch size of a resumed run; None for a new run."""
    resumed: int | None = None
    problem = ""
    if world.is_first:
        try:
            resumed = next(
                (manifest.global_batch_size for manifest in committed_manifests(saving.store())),
                None,
            )
        except (MusterError, OSError) as error:
            problem = str(error)
    resumed, problem = all_gather_object([resumed, problem], world)[0]
    if problem:
        raise MusterError(
            f"cannot read this run's checkpoints: {problem}",
            fix="restore access to their location; without its checkpoints the run would start from "
            "scratch",
        )
    return resumed


def _training_loss(settings: Settings, recipe: ModelRecipe, text: TextData | None) -> losses.Loss:
    name = settings.model.loss or recipe.usual_loss
    if text is not None and name == "classification":
        raise Impossible(
            "the loss classification cannot be computed from rows of text",
            why="; ".join(recipe.reasons()) + ". Rows of text have the next token as their label",
            fix="give data.dataset: module:function, which returns dictionaries with the inputs of "
            "the model and labels; or train another model",
        )
    return losses.loss_named(name) or factory.find_import(name, "model.loss")


def _epochs(settings: Settings) -> int | None:
    wanted = settings.train
    return wanted.epochs or (1 if wanted.steps is None else None)


def _optimizer(wanted: Train) -> optimizers.MakeOptimizer:
    if ":" not in wanted.optimizer:
        return optimizers.optimizer_named(
            cast(optimizers.Name, wanted.optimizer),
            learning_rate=wanted.learning_rate,
            weight_decay=wanted.weight_decay,
            **(wanted.optimizer_options or {}),
        )
    make = factory.find_import(wanted.optimizer, "train.optimizer")
    return partial(make, **(wanted.optimizer_options or {}))


def _schedule(
    settings: Settings, loader: Loader
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    wanted = settings.train
    in_epoch, epochs = loader.steps_in_epoch(), _epochs(settings)
    total = wanted.steps
    if epochs is not None and in_epoch is not None:
        total = epochs * in_epoch
    warmup_steps = warmup_steps_of(wanted, total)
    if warmup_steps is None:
        raise Impossible(
            f"train.warmup is {wanted.warmup}, but the number of steps is not known here",
            why="the length of a stream is known only at its end",
            fix="set train.steps, or give the warm-up as a number of steps",
        )
    decay_steps = None
    if wanted.schedule == "warmup_stable_decay" and total is not None:
        decay_steps = min(-(-total // 10), total - warmup_steps)
    return lambda optimizer: optimizers.schedule(
        optimizer,
        wanted.schedule,
        warmup_steps=warmup_steps,
        total_steps=total,
        decay_steps=decay_steps,
    )


def _save(trainer: Trainer, recipe: ModelRecipe, place: Path, *, beside: Path) -> None:
    """Write the trained weights, LoRA matrices or full model, with config and tokenizer; check them."""
    world, strategy = trainer.world, trainer.strategy.value

    if recipe.lora is None:
        hashes = save_weights(trainer.model, strategy, place, world, beside=beside)
    else:
        state = strategy.state_dict(trainer.model)["model"]
        hashes = lora.save_adapters(trainer.model, state, place, world, beside=beside)
    with rank_zero_first(world):
        if world.is_first:
            progress.phase = "checking the weights"
            rank_zero_log(world, _check_final(recipe, place, hashes))
            progress.phase = ""


def _check_final(recipe: ModelRecipe, place: Path, hashes: dict[str, str]) -> str:
    """Check the bits and the names of the final weights; return which checks were made."""
    try:
        count = compare_hashes(place, hashes)
        text = f"checked: {plural(count, 'tensor')} equal to those of the trained model"
        if recipe.files is None:
            return text
        names = run_exporter(ExportRequest(folder=str(place)), limit_s=_NAMES_WITHIN_S)
        return f"{text}; {names.unchecked or 'their names are those of the model'}"
    except MusterError as error:
        raise MusterError(
            f"do not use the weights in {place}: {error.what}",
            why=error.why,
            fix=f"{error.fix}. The training state is saved: muster train --resume RUN writes the "
            "weights again",
        ) from error
