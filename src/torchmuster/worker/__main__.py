"""The program of each rank for training from settings.

It also works under plain torchrun::

    torchrun --nproc-per-node 2 -m torchmuster.worker --config config.yaml --set train.steps=100

``muster train`` starts it on every rank. It translates settings into the parts of ``train/``, which
know nothing about settings.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmuster.config import written
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.config.training import check_trainable, paths_for_ranks, with_absolute_folder
from torchmuster.config.written import settings_yaml
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.runfolder import DEFAULT_ROOT, create_run_folder, write_atomically
from torchmuster.train.world import World, all_gather_object, assert_same_on_all_ranks, join_world
from torchmuster.worker.reporting import rank_zero_log, refuse_missing_sinks
from torchmuster.worker.training import train_from_settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Train from settings; print an error as one message and exit."""
    options = _parser().parse_args(arguments)
    try:
        resolved = with_absolute_folder(
            resolve_settings(file=options.config, environment=os.environ, flags=options.set)
        )
        check_trainable(resolved, file=str(options.config or "the settings"))
        on_cpu = "cpu" in (options.device, resolved.settings.model.device_map)
        with join_world("cpu" if on_cpu else "auto") as world:
            if options.run_folder is None:
                check_ranks(resolved, world)
            values = resolved.values()
            assert_same_on_all_ranks({path: values[path] for path in paths_for_ranks()}, world)
            _refuse_missing_gpu(resolved, options.device, world)
            refuse_missing_sinks(resolved, world)
            folder = options.run_folder or _new_folder(resolved, world)
            train_from_settings(resolved.settings, world, folder)
    except MusterError as error:
        # As the exit message: launchers show it as the reason, without a traceback.
        sys.exit(str(error))


def _refuse_missing_gpu(resolved: Resolved, device: str, world: World) -> None:
    if resolved.settings.model.device_map == "cuda" and world.device.type == "cpu":
        if device == "cpu":
            return  # a flag overrides the file
        raise Impossible(
            f"model.device_map is cuda, but rank {world.global_rank} has no GPU",
            why="; ".join(world.reasons) or "torch finds no GPU here",
            fix="muster doctor shows the cause; --device cpu trains without GPUs",
        )


def check_ranks(resolved: Resolved, world: World) -> None:
    """Compare the settings with the ranks that another launcher has started."""
    wanted, started = resolved.settings.distributed, world.local_world_size
    if not wanted.enabled and world.world_size > 1:
        raise Impossible(
            f"distributed.enabled is false, but {world.world_size} ranks were started",
            why=f"it is set by {resolved.sources['distributed.enabled'].where}; false means one process",
            fix="start one process, or add --set distributed.enabled=true",
        )
    if wanted.num_gpus not in (None, started):
        rank_zero_log(
            world,
            f"distributed.num_gpus is {wanted.num_gpus}, but {started} ranks were started on this "
            "host: the launcher's --nproc-per-node takes precedence",
        )
    if wanted.gpu_ids is not None and world.device.type != "cpu":
        rank_zero_log(
            world,
            "distributed.gpu_ids has no effect under another launcher: set CUDA_VISIBLE_DEVICES",
        )


def _new_folder(resolved: Resolved, world: World) -> Path:
    """Create a run folder with its settings if none was given; all ranks get its path."""
    path = ""
    if world.is_first:
        run = create_run_folder(DEFAULT_ROOT, resolved.settings.experiment_name)
        write_atomically(run.config, settings_yaml(resolved))
        path = str(run.path)
    return Path(all_gather_object(path, world)[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchmuster.worker",
        description="Train from settings, as one rank.",
        allow_abbrev=False,
    )
    written.add_arguments(parser)
    return parser


if __name__ == "__main__":
    try:
        main()
    finally:
        freeze_objects()
