"""Where our own ``Trainer`` waits for data: its loaders are not torch's, so the DataLoader's door shows nothing of them."""

import functools
from typing import Any

from torchmuster.bench.probes.phases import Phases
from torchmuster.bench.profile.recording_words import Loader
from torchmuster.train.defaults import micro_batch_size
from torchmuster.train.metrics.step_metrics import StepMetrics
from torchmuster.train.trainer import Trainer


class OwnTrainer:
    """Hears when a ``Trainer`` waits, and which loader it reads from."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._trainer: Trainer | None = None

    def watch(self) -> None:
        """Stand at the trainer's doors."""
        phases, wait, work, fit = self._phases, StepMetrics.wait, StepMetrics.work, Trainer.fit

        @functools.wraps(wait)
        def watched_wait(tally: StepMetrics) -> None:
            phases.begin_wait()
            wait(tally)

        @functools.wraps(work)
        def watched_work(tally: StepMetrics) -> None:
            work(tally)
            phases.end_wait()

        @functools.wraps(fit)
        def watched_fit(trainer: Trainer, **named: Any) -> Any:
            self._trainer = trainer
            return fit(trainer, **named)

        StepMetrics.wait = watched_wait  # type: ignore[method-assign, assignment]
        StepMetrics.work = watched_work  # type: ignore[method-assign, assignment]
        Trainer.fit = watched_fit  # type: ignore[method-assign, assignment]

    def loader(self) -> Loader | None:
        """Return what the trainer reads from; None where no trainer of ours has run."""
        if self._trainer is None:
            return None
        loader, world = self._trainer.loader, self._trainer.world
        size = micro_batch_size(loader, world)
        return Loader(
            workers=getattr(loader, "workers", 0),
            batch_size=size,
            samples_per_batch=size,
            pin_memory=False,
            prefetch_factor=None,
            dataset=type(getattr(loader, "dataset", loader)).__name__,
        )
