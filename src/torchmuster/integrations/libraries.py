"""Enable recording of a rank's script, for the libraries that it imports."""

from pathlib import Path
from types import ModuleType

from torchmuster.integrations.import_hooks import when_imported
from torchmuster.integrations.recorder import Recorder, begin_recording
from torchmuster.integrations.torch_hooks import watch_torch


def record_script(rank: int, records: Path, world_size: int) -> Recorder:
    """Record steps, losses and checkpoints from now on; Lightning finds its callback through an entry point."""
    recorder = begin_recording(rank, records, world_size)
    watch_torch(recorder)
    when_imported("transformers.trainer", _watch_transformers)
    when_imported("accelerate.accelerator", _watch_accelerate)
    when_imported("lightning.fabric.fabric", _watch_fabric)
    when_imported("deepspeed.runtime.engine", _watch_deepspeed)
    when_imported("torchtitan.components.metrics", _watch_torchtitan)
    return recorder


def _watch_transformers(module: ModuleType) -> None:
    from torchmuster.integrations.transformers import add_to_every_trainer

    add_to_every_trainer(module)


def _watch_accelerate(module: ModuleType) -> None:
    from torchmuster.integrations.accelerate import watch_accelerator

    watch_accelerator(module)


def _watch_fabric(module: ModuleType) -> None:
    from torchmuster.integrations.lightning import watch_fabric_saves

    watch_fabric_saves(module)


def _watch_deepspeed(module: ModuleType) -> None:
    from torchmuster.integrations.deepspeed import watch_engine

    watch_engine(module)


def _watch_torchtitan(module: ModuleType) -> None:
    from torchmuster.integrations.torchtitan import watch_metrics

    watch_metrics(module)
