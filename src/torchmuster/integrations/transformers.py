"""Record the losses, evaluations and checkpoints of Hugging Face's Trainer, and of TRL's trainers.

``muster run`` adds the callback by itself. Where it does not (another launcher), pass it:
``Trainer(..., callbacks=[MusterCallback()])``.
"""

import contextlib
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import TrainerCallback

from torchmuster.integrations import recorder as recording

_NOT_RESULTS = ("runtime", "per_second", "preparation_time")
_SUMMARY = "train_"  # figures of the whole run, at its end


class MusterCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not installed where types are checked
    """Forwards what the Trainer logs to ``muster run``; does nothing under other launchers."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count from the step of a resumed run."""
        self._began_unix_s = time.time()
        self._saved: set[int] = set()
        if recording.recorder is not None:
            recording.recorder.begin_at(int(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record a line of the log."""
        numbers = dict(logs or {})
        if recording.recorder is None or "loss" not in numbers:
            return
        values = {k: v for k, v in numbers.items() if not k.startswith(_SUMMARY)}
        recording.recorder.log(values, int(state.global_step))

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Record an evaluation."""
        if recording.recorder is not None and metrics:
            numbers = {
                name.removeprefix("eval_"): value
                for name, value in metrics.items()
                if name != "epoch" and not name.endswith(_NOT_RESULTS)
            }
            recording.recorder.evaluated(numbers, int(state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record a checkpoint."""
        self._record_checkpoint(args, int(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record a checkpoint made after SIGTERM (``enable_jit_checkpoint``), which does not call ``on_save``."""
        for step in (int(state.global_step) - 1, int(state.global_step)):
            written = Path(args.output_dir) / f"checkpoint-{step}" / "trainer_state.json"
            with contextlib.suppress(OSError):
                if step not in self._saved and written.stat().st_mtime >= self._began_unix_s:
                    self._record_checkpoint(args, step)

    def _record_checkpoint(self, args: Any, step: int) -> None:
        if recording.recorder is not None:
            self._saved.add(step)
            path = str(Path(args.output_dir) / f"checkpoint-{step}")
            recording.recorder.saved(path, library="transformers", step=step)


def add_to_every_trainer(trainer_module: ModuleType) -> None:
    """Add the callback to every ``Trainer`` that is made from now on."""
    trainer_module.DEFAULT_CALLBACKS.append(MusterCallback)
