"""``Saves``: when :class:`torchmuster.train.trainer.Trainer` saves its state, and how it resumes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torchmuster.checkpoints.base_model import BaseModel
from torchmuster.checkpoints.store import Store, open_store
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status, render
from torchmuster.train import seeds
from torchmuster.train.checkpointing.checkpointer import Checkpointer, Loaded, SaveReport
from torchmuster.train.models.parameters import frozen_names, is_below
from torchmuster.train.seeds import derive_seed, seed_process
from torchmuster.train.stop_request import StoppedAtRequest, StopRequest
from torchmuster.units import plural

if TYPE_CHECKING:
    from torchmuster.train.trainer import Trainer

# The random states that determine a loader's order, if it has them.
_LOADERS_OWN = "epoch_began"


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where to save the training state, and how often: every N steps or seconds, and at the end.

    ``to`` is a folder, a URL such as ``s3://bucket/path``, or a store. ``keep`` is the number of newest
    checkpoints to keep; ``keep_best`` also saves after each evaluation with the lowest ``loss`` so far,
    and keeps that checkpoint. Rank 0 measures the seconds and sends them to the other ranks with every
    step line, so saves follow a step line. With ``stop``, a signal to any rank makes all of them save
    after the same step and exit. With ``base``, frozen parameters are not saved: they are those of its
    files, and a resumed run loads them from there again.
    """

    to: "Store | Path | str"
    every: int | None = None
    every_s: float | None = None
    keep: int = 3
    keep_best: bool = False
    stop: StopRequest | None = None
    base: BaseModel | None = None

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("every_s", self.every_s), ("keep", self.keep)):
            if value is not None and value <= 0:
                raise Impossible(f"{name} is {value:g}, but must be above 0")

    def store(self) -> Store:
        """Return the store; nothing is created there yet."""
        return open_store(self.to) if isinstance(self.to, str | Path) else self.to


class Saves:
    """The saves of one call of ``Trainer.fit``, or its resume; all ranks call the same methods.

    Inside a ``with``, room is checked first, and the final state is saved at the end.
    """

    def __init__(self, trainer: "Trainer", settings: CheckpointSettings) -> None:
        self._trainer = trainer
        self._settings = settings
        split = getattr(trainer.loader, "portions", None)
        self._checkpointer = Checkpointer(
            settings.store(),
            keep=settings.keep,
            strategy=trainer.strategy.value.name,
            global_batch_size=None if split is None else split.global_batch_size,
            on_saved=self._reported,
        )
        self._saved_step: int | None = None
        self._saved_at_s = 0.0
        self._is_last = False  # whether the current save's problem is raised

    def __enter__(self) -> Self:
        with self._complete_state() as state:
            self._trainer.reports.say(self._checkpointer.check_room(self._without_base(state)))
        self._trainer.reports.begin_saves()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            step = self._trainer.step
            self._save_and_wait(f"the final state, step {step}, could not be saved")
        self._checkpointer.__exit__(kind, error, trace)

    def after_step(self, elapsed_s: float, *, best: float | None = None) -> None:
        """Save if it is due; if a stop was requested, save and raise :class:`StoppedAtRequest`.

        ``elapsed_s`` is the same on all ranks. ``best`` is the evaluated loss if it is the lowest so far.
        """
        self._checkpointer.poll()
        step = self._trainer.step
        settings = self._settings
        is_due = settings.every is not None and step % settings.every == 0
        if settings.every_s is not None and elapsed_s - self._saved_at_s >= settings.every_s:
            is_due = True
        if is_due or best is not None:
            self._save(best)
            self._saved_at_s = elapsed_s
        if settings.stop is not None and settings.stop.due(step):
            self._save_and_wait(
                f"stop requested ({settings.stop.origin}), but step {step} could not be saved"
            )
            raise StoppedAtRequest(step, settings.stop.origin)

    def resume(self) -> Loaded | None:
        """Load the newest good checkpoint into the trainer; None if there is none."""
        trainer, world = self._trainer, self._trainer.world
        with self._checkpointer, self._complete_state() as state:
            saved = self._without_base(state)
            frozen = [f"model.{name}" for name in state["model"] if name not in saved["model"]]
            loaded = self._checkpointer.load({**saved, "model": state["model"]}, optional=frozen)
            if loaded is not None:
                trainer.restore(loaded.state)
        if loaded is not None and loaded.own is not None:
            seeds.load_random_states(loaded.own, world)
            if _LOADERS_OWN in loaded.own and hasattr(trainer.loader, _LOADERS_OWN):
                setattr(trainer.loader, _LOADERS_OWN, loaded.own[_LOADERS_OWN])
        elif loaded is not None:  # each rank needs different random numbers
            seed_process(derive_seed(trainer.seed, "resume", trainer.step, world.global_rank))
        trainer.reports.go_on_from(trainer.step, evaluated=trainer.evaluated)
        if loaded is not None:
            ranks = plural(loaded.newest.manifest.world_size, "rank")
            text = f"resuming from step {loaded.step} (saved by {ranks}, now {world.world_size})"
            trainer.reports.say("\n".join([*render(loaded.newest.rejected).splitlines(), text]))
        return loaded

    def _save(self, best: float | None = None) -> None:
        """Copy the state; it is written in the background."""
        trainer = self._trainer
        own = seeds.save_random_states(trainer.world)
        began = getattr(trainer.loader, _LOADERS_OWN, None)
        if began:
            own[_LOADERS_OWN] = began
        with trainer.log.spending("saving"):
            is_new = not trainer.optimizer.state
            state = trainer.state()
            if is_new:  # no step was applied yet, but torch's new states count one
                trainer.optimizer.state.clear()
                state["optimizer"]["state"] = {}
            self._checkpointer.save(
                self._without_base(state),
                trainer.step,
                own=own,
                best=None if best is None else {"loss": best},
            )
        self._saved_step = trainer.step

    def _save_and_wait(self, failure: str) -> None:
        """Save this step unless it is saved; raise if that fails."""
        report = self._checkpointer.wait()
        if self._saved_step != self._trainer.step or (report is not None and report.problem):
            self._is_last = True
            self._save()
            report = self._checkpointer.wait()
        if report is not None and report.problem is not None:
            raise MusterError(
                failure,
                why=report.problem,
                fix="earlier checkpoints are unchanged: fix the cause, and rerun to resume from the newest",
            )

    def _reported(self, report: SaveReport) -> None:
        problem = ""
        if report.problem is not None and not self._is_last:
            finding = Finding(
                name="not-saved",
                status=Status.WARNING,
                what=f"step {report.step} could not be saved; training continues",
                why=report.problem,
                fix="the next save is attempted as usual; until one succeeds, a restart resumes "
                "from the previous checkpoint",
            )
            problem = render([finding])
        saved_step = report.step if report.problem is None else None
        self._trainer.reports.saved(saved_step, problem, asdict(report))

    def _without_base(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state without the frozen parameters that are in the files of the base model."""
        base = self._settings.base
        if base is None:
            return state
        frozen = frozen_names(self._trainer.model)
        model = {}
        for name, tensor in state["model"].items():
            if not is_below(name, frozen):
                model[name] = tensor
        return {**state, "model": model, "base": base.as_json()}

    @contextmanager
    def _complete_state(self) -> Iterator[dict[str, Any]]:
        """Return the state with the optimizer's tensors, even before the first step has created them.

        torch creates them by a step that changes no weight but is counted, so they are removed again.
        """
        trainer = self._trainer
        is_new, step = not trainer.optimizer.state, trainer.step
        yield trainer.state()
        if is_new and trainer.step == step:
            trainer.optimizer.state.clear()
