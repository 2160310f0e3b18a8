"""The program of each rank for training from settings.

``muster train`` starts it on every rank, with the folder of the run. It translates settings into the parts of ``train/``, which
know nothing about settings.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmuster.config import written
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.config.training import check_trainable, with_absolute_folder
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.train.world import World, join_world
from torchmuster.worker.reporting import refuse_missing_sinks
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
            _refuse_missing_gpu(resolved, options.device, world)
            refuse_missing_sinks(resolved, world)
            train_from_settings(resolved.settings, world, options.run_folder)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchmuster.worker",
        description="Train from settings, as one rank.",
        allow_abbrev=False,
    )
    written.add_arguments(parser)
    parser.add_argument("--run-folder", type=Path, metavar="DIR", required=True)
    return parser


if __name__ == "__main__":
    try:
        main()
    finally:
        freeze_objects()
