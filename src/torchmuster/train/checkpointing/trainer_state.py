"""What :class:`torchmuster.train.trainer.Trainer` saves and goes on from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.finding import render
from torchmuster.train import seeds
from torchmuster.train.checkpointing.checkpointer import Checkpointer, Loaded, SaveReport
from torchmuster.train.checkpointing.policy import (
    CheckpointPolicy,
    CheckpointSettings,
    save_message,
)
from torchmuster.train.data.step import Loader
from torchmuster.train.defaults import portions_of
from torchmuster.train.metrics.reports import Reports
from torchmuster.train.models.lora import peft_config
from torchmuster.train.seeds import derive_seed, seed_process
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.weights import own_name
from torchmuster.train.world import World
from torchmuster.units import plural

# Of a loader that has it: the random states that its order comes from.
_LOADERS_OWN = "epoch_began"


class SavedTrainer(Protocol):
    """What a checkpoint needs of :class:`torchmuster.train.trainer.Trainer`."""

    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    strategy: Decision[Strategy]
    reports: Reports
    seed: int
    step: int
    evaluated: int

    @property
    def reported(self) -> int:
        """The step of the last line."""

    def state(self) -> dict[str, Any]:
        """Return what is saved."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what was saved."""


@contextmanager
def trainer_states(trainer: SavedTrainer, saving: CheckpointSettings) -> Iterator[CheckpointPolicy]:
    """Make saves possible while a training goes on, and save what it has come to at its end."""

    def say(report: SaveReport) -> None:
        trainer.reports.saved(save_message(report, is_last=saves.is_last), asdict(report))

    with _checkpointer(trainer, saving, on_saved=say) as checkpointer:
        saves = CheckpointPolicy(saving, checkpointer, take=lambda: _trainer_state_taken(trainer))
        with _complete_state(trainer) as state:
            said = saves.check_room(state)
        trainer.reports.say(said)
        if saving.mode == "auto" and checkpointer.mode.value == "sync":
            trainer.reports.say(f"checkpoints: {checkpointer.mode.reason}")
        trainer.reports.begin_saves()
        yield saves
        saves.end(trainer.step)


def resume_trainer(trainer: SavedTrainer, saving: CheckpointSettings) -> Loaded | None:
    """Read the newest good checkpoint into a trainer; None if there is none."""
    with _checkpointer(trainer, saving) as checkpointer, _complete_state(trainer) as state:
        loaded = checkpointer.load(state)
        if loaded is not None:
            trainer.restore(loaded.state)
    world = trainer.world
    if loaded is not None and loaded.own is not None:
        seeds.load_random_states(loaded.own, world)
        if _LOADERS_OWN in loaded.own and hasattr(trainer.loader, _LOADERS_OWN):
            setattr(trainer.loader, _LOADERS_OWN, loaded.own[_LOADERS_OWN])
    elif loaded is not None:  # each rank needs numbers that no other draws
        seed_process(derive_seed(trainer.seed, "resume", trainer.step, world.global_rank))
    trainer.reports.go_on_from(trainer.reported, evaluated=trainer.evaluated)
    if loaded is not None:
        trainer.reports.say(_trainer_state_text(loaded, trainer))
    return loaded


def _checkpointer(
    trainer: SavedTrainer,
    saving: CheckpointSettings,
    on_saved: Callable[[SaveReport], None] = lambda report: None,
) -> Checkpointer:
    model = trainer.model
    adapted = peft_config(model) is not None  # most of it is frozen, and stays as it is
    portions = portions_of(trainer.loader)
    return Checkpointer(
        saving.store(),
        trainer.world,
        keep=saving.keep,
        mode=saving.mode,
        strategy=trainer.strategy.value.name,
        global_batch_size=None if portions is None else portions.global_batch_size,
        buffers=[own_name(name) for name, _ in model.named_buffers()] if adapted else None,
        on_saved=on_saved,
    )


def _trainer_state_taken(trainer: SavedTrainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that is saved, and what is this rank's own."""
    own = seeds.save_random_states(trainer.world)
    if began := getattr(trainer.loader, _LOADERS_OWN, None):
        own[_LOADERS_OWN] = began
    is_new = not trainer.optimizer.state
    state = trainer.state()
    if is_new:  # no step was applied yet; what torch makes counts one
        trainer.optimizer.state.clear()
        state["optimizer"]["state"] = {}
    return state, own


@contextmanager
def _complete_state(trainer: SavedTrainer) -> Iterator[dict[str, Any]]:
    """Give the state with the optimiser's tensors, also before they are there.

    torch makes them by a step that changes no weight but is counted, so they are forgotten again.
    """
    is_new, step = not trainer.optimizer.state, trainer.step
    yield trainer.state()
    if is_new and trainer.step == step:
        trainer.optimizer.state.clear()


def _trainer_state_text(loaded: Loaded, trainer: SavedTrainer) -> str:
    """Say what was read, and what was wrong with newer ones."""
    found, ranks = loaded.found, trainer.world.world_size
    saved_by = found.manifest.world_size
    now = "" if saved_by == ranks else f", now {ranks}"
    text = f"going on from step {loaded.step} (of {plural(saved_by, 'rank')}{now})"
    return "\n".join(filter(None, [render(found.rejected), text]))
