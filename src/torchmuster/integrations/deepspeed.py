"""Record the loss and the checkpoints of a DeepSpeed script.

``muster run`` wraps ``backward``, ``step`` and ``save_checkpoint`` of ``DeepSpeedEngine``. The loss is rank 0's, of the last
micro-batch of a step. Under Accelerate and Hugging Face's Trainer it comes from these libraries instead.
"""

import sys
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torchmuster.integrations import recorder as recording
from torchmuster.integrations.wrap import Call, wrap


def watch_engine(module: ModuleType) -> None:
    """Record the loss and the checkpoints of every ``DeepSpeedEngine`` from now on."""
    losses: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of the last micro-batch
    reported: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the last step of each engine

    def computed(call: Call) -> None:
        losses[call.arguments["self"]] = call.arguments["loss"]

    def stepped(call: Call) -> None:
        engine = call.arguments["self"]
        loss = losses.pop(engine, None)
        is_new = engine.global_steps > reported.get(engine, 0)
        reported[engine] = engine.global_steps
        if is_new and loss is not None and not _is_reported_by_accelerate():
            recording.log(engine.global_steps, loss=loss)

    def saved(call: Call) -> None:
        if recording.recorder is None or _is_reported_by_accelerate():
            return
        step = call.arguments["self"].global_steps
        tag = call.arguments.get("tag") or f"global_step{step}"
        place = f"{call.arguments['save_dir']}/{tag}"
        recording.recorder.saved(place, library="deepspeed", step=step, seconds=call.seconds)

    wrap(module.DeepSpeedEngine, "backward", before=computed)
    wrap(module.DeepSpeedEngine, "step", after=stepped)
    wrap(module.DeepSpeedEngine, "save_checkpoint", after=saved, saves=True)


def _is_reported_by_accelerate() -> bool:
    """Return whether Accelerate, which the Trainer uses too, reports losses and checkpoints."""
    return "accelerate.accelerator" in sys.modules
