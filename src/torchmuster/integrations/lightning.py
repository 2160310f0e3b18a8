"""Record the losses, evaluations and checkpoints of Lightning's Trainer, and the checkpoints of Fabric.

Lightning finds the callback through its entry point (``lightning.pytorch.callbacks_factory``), so a script needs no change.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from torchmuster.integrations import recorder as recording
from torchmuster.integrations.wrap import Call, wrap

# How names of an evaluation begin, by convention.
_EVALUATED = ("val", "test", "eval")


def callbacks() -> list[Any]:
    """Return the callback for ``lightning``; none outside of ``muster run``."""
    return _callbacks("lightning.pytorch")


def old_callbacks() -> list[Any]:
    """Return the callback for the package ``pytorch_lightning``; none outside of ``muster run``."""
    return _callbacks("pytorch_lightning")


def watch_fabric_saves(module: ModuleType) -> None:
    """Record what every ``Fabric`` saves from now on."""

    def saved(call: Call) -> None:
        if recording.recorder is not None:
            place = str(call.arguments["path"])
            recording.recorder.saved(place, library="torch.save", seconds=call.seconds)

    wrap(module.Fabric, "save", after=saved, saves=True)


def _callbacks(package: str) -> list[Any]:
    if recording.recorder is None or package not in sys.modules:
        return []
    recorder = recording.recorder
    base = importlib.import_module(f"{package}.callbacks").Callback

    def numbers_of(metrics: Any, *, evaluated: bool) -> dict[str, Any]:
        names = {str(name): value for name, value in metrics.items()}
        return {k: v for k, v in names.items() if k.startswith(_EVALUATED) == evaluated}

    class MusterCallback(base):  # type: ignore[misc, valid-type]
        """Forwards what the module logs to ``muster run``."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            recorder.begin_at(int(trainer.global_step))

            def saved(call: Call) -> None:
                step = int(trainer.global_step)
                recorder.saved(str(call.arguments["filepath"]), library="lightning", step=step)

            wrap(trainer, "save_checkpoint", after=saved)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            step = int(trainer.global_step)
            if step and step % trainer.log_every_n_steps == 0 and step != self._logged:
                self._logged = step
                numbers = numbers_of(trainer.logged_metrics, evaluated=False)
                loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
                if loss is not None and not any("loss" in name for name in numbers):
                    numbers["loss"] = loss
                names = {name.removesuffix("_step"): value for name, value in numbers.items()}
                recorder.log({**names, "epoch": trainer.current_epoch}, step)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                numbers = numbers_of(trainer.callback_metrics, evaluated=True)
                recorder.evaluated(numbers, int(trainer.global_step))

        _logged = -1

    return [MusterCallback()]
