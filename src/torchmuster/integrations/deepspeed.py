"""Record the loss and the checkpoints of a DeepSpeed script.

``muster run`` wraps ``backward``, ``step`` and ``save_checkpoint`` of ``DeepSpeedEngine``. The loss is rank 0's, of the last
micro-batch of a step. Under Accelerate and Hugging Face's Trainer it comes from these libraries instead.
"""

import functools
import sys
import time
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torchmuster.integrations import recorder as recording


def watch_engine(module: ModuleType) -> None:
    """Record the loss and the checkpoints of every ``DeepSpeedEngine`` from now on."""
    kind = module.DeepSpeedEngine
    losses: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of the last micro-batch
    backward, step, save_checkpoint = kind.backward, kind.step, kind.save_checkpoint

    @functools.wraps(backward)
    def computed(self: Any, loss: Any, *arguments: Any, **names: Any) -> Any:
        losses[self] = loss
        return backward(self, loss, *arguments, **names)

    @functools.wraps(step)
    def stepped(self: Any, *arguments: Any, **names: Any) -> Any:
        before = self.global_steps
        result = step(self, *arguments, **names)
        loss = losses.pop(self, None)
        if self.global_steps > before and loss is not None and not _is_reported_by_accelerate():
            recording.log(self.global_steps, loss=loss)
        return result

    @functools.wraps(save_checkpoint)
    def saved(self: Any, save_dir: Any, tag: Any = None, *arguments: Any, **names: Any) -> Any:
        recorder = recording.recorder
        if recorder is None:
            return save_checkpoint(self, save_dir, tag, *arguments, **names)
        began = time.perf_counter()
        with recorder.library_saves():
            result = save_checkpoint(self, save_dir, tag, *arguments, **names)
        if not _is_reported_by_accelerate():
            took_s = time.perf_counter() - began
            place = f"{save_dir}/{tag or f'global_step{self.global_steps}'}"
            recorder.saved(place, library="deepspeed", step=self.global_steps, seconds=took_s)
        return result

    kind.backward, kind.step, kind.save_checkpoint = computed, stepped, saved


def _is_reported_by_accelerate() -> bool:
    """Return whether Accelerate, which the Trainer uses too, reports losses and checkpoints."""
    return "accelerate.accelerator" in sys.modules
