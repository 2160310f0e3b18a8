"""Enable recording of a rank's script, for the libraries that it imports."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torchmuster.integrations.import_hooks import when_imported
from torchmuster.integrations.recorder import Recorder, begin_recording
from torchmuster.integrations.torch_hooks import watch_torch

# A library's module -> our module and its function that watches it. Ours is imported with the library's.
_WATCHED = {
    "transformers.trainer": ("transformers", "add_to_every_trainer"),
    "accelerate.accelerator": ("accelerate", "watch_accelerator"),
    "lightning.fabric.fabric": ("lightning", "watch_fabric_saves"),
    "deepspeed.runtime.engine": ("deepspeed", "watch_engine"),
    "torchtitan.components.metrics": ("torchtitan", "watch_metrics"),
}


def record_script(rank: int, records: Path, world_size: int) -> Recorder:
    """Record steps, losses and checkpoints from now on; Lightning finds its callback through an entry point."""
    recorder = begin_recording(rank, records, world_size)
    watch_torch(recorder)
    for library, (module, function) in _WATCHED.items():
        when_imported(library, _watcher(module, function))
    return recorder


def _watcher(module: str, function: str) -> Callable[[ModuleType], None]:
    def watch(library: ModuleType) -> None:
        own = importlib.import_module(f"torchmuster.integrations.{module}")
        getattr(own, function)(library)

    return watch
