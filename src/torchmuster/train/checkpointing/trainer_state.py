"""Save and restore the state of :class:`torchmuster.train.trainer.Trainer`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchmuster.finding import render
from torchmuster.train import seeds
from torchmuster.train.checkpointing.checkpointer import Checkpointer, Loaded, SaveReport
from torchmuster.train.checkpointing.policy import (
    CheckpointPolicy,
    CheckpointSettings,
    save_message,
)
from torchmuster.train.models.parameters import frozen_names, is_below
from torchmuster.train.seeds import derive_seed, seed_process
from torchmuster.units import plural

if TYPE_CHECKING:
    from torchmuster.train.trainer import Trainer

# The random states that determine a loader's order, if it has them.
_LOADERS_OWN = "epoch_began"


@contextmanager
def trainer_states(trainer: "Trainer", saving: CheckpointSettings) -> Iterator[CheckpointPolicy]:
    """Enable saves during training, and save the final state."""

    def say(report: SaveReport) -> None:
        problem = save_message(report, is_last=saves.is_last, retries=saving.retry_final)
        trainer.reports.saved(report.step, problem, asdict(report))

    with _checkpointer(trainer, saving, on_saved=say) as checkpointer:
        saves = CheckpointPolicy(saving, checkpointer, take=lambda: _state_and_own(trainer, saving))
        with _complete_state(trainer) as state:
            warning = saves.check_room(_state_to_save(state, trainer, saving))
        trainer.reports.say(warning)
        trainer.reports.begin_saves()
        yield saves
        saves.end(trainer.step)


def resume_trainer(trainer: "Trainer", saving: CheckpointSettings) -> Loaded | None:
    """Load the newest good checkpoint into a trainer; None if there is none."""
    with _checkpointer(trainer, saving) as checkpointer, _complete_state(trainer) as state:
        saved = _state_to_save(state, trainer, saving)
        frozen = [f"model.{name}" for name in state["model"] if name not in saved["model"]]
        loaded = checkpointer.load({**saved, "model": state["model"]}, optional=frozen)
        if loaded is not None:
            trainer.restore(loaded.state)
    world = trainer.world
    if loaded is not None and loaded.own is not None:
        seeds.load_random_states(loaded.own, world)
        if _LOADERS_OWN in loaded.own and hasattr(trainer.loader, _LOADERS_OWN):
            setattr(trainer.loader, _LOADERS_OWN, loaded.own[_LOADERS_OWN])
    elif loaded is not None:  # each rank needs different random numbers
        seed_process(derive_seed(trainer.seed, "resume", trainer.step, world.global_rank))
    trainer.reports.go_on_from(trainer.reported, evaluated=trainer.evaluated)
    if loaded is not None:
        trainer.reports.say(_resuming_text(loaded, trainer))
    return loaded


def _checkpointer(
    trainer: "Trainer",
    saving: CheckpointSettings,
    on_saved: Callable[[SaveReport], None] | None = None,
) -> Checkpointer:
    portions = getattr(trainer.loader, "portions", None)
    return Checkpointer(
        saving.store(),
        keep=saving.keep,
        strategy=trainer.strategy.value.name,
        global_batch_size=None if portions is None else portions.global_batch_size,
        on_saved=on_saved,
    )


def _state_to_save(
    state: dict[str, Any], trainer: "Trainer", saving: CheckpointSettings
) -> dict[str, Any]:
    """Return a state without the frozen parameters that are in the files of the base model."""
    if saving.base is None:
        return state
    frozen = frozen_names(trainer.model)
    model = {name: tensor for name, tensor in state["model"].items() if not is_below(name, frozen)}
    return {**state, "model": model, "base": saving.base.as_json()}


def _state_and_own(
    trainer: "Trainer", saving: CheckpointSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state to save, and this rank's own part."""
    own = seeds.save_random_states(trainer.world)
    began = getattr(trainer.loader, _LOADERS_OWN, None)
    if began:
        own[_LOADERS_OWN] = began
    is_new = not trainer.optimizer.state
    state = trainer.state()
    if is_new:  # no step was applied yet, but torch's new states count one
        trainer.optimizer.state.clear()
        state["optimizer"]["state"] = {}
    return _state_to_save(state, trainer, saving), own


@contextmanager
def _complete_state(trainer: "Trainer") -> Iterator[dict[str, Any]]:
    """Return the state with the optimizer's tensors, even before the first step has created them.

    torch creates them by a step that changes no weight but is counted, so they are removed again.
    """
    is_new, step = not trainer.optimizer.state, trainer.step
    yield trainer.state()
    if is_new and trainer.step == step:
        trainer.optimizer.state.clear()


def _resuming_text(loaded: Loaded, trainer: "Trainer") -> str:
    """Report what was loaded, and why newer checkpoints were skipped."""
    newest, ranks = loaded.newest, trainer.world.world_size
    saved_by = newest.manifest.world_size
    origin = f"saved by {plural(saved_by, 'rank')}"
    if saved_by != ranks:
        origin += f", now {ranks}"
    text = f"resuming from step {loaded.step} ({origin})"
    return "\n".join(filter(None, [render(newest.rejected), text]))
