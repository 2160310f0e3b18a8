"""Training runs from settings, several in one group of ranks."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.train.world import World
from torchmuster.worker import exported, training


def train_file(world: World, folder: str, file: str, settings: Mapping[str, str], run: str) -> None:
    """Train with a settings file in the folder, and with these settings instead of some of its."""
    os.chdir(folder)
    flags = [Flag(flag="--set", path=path, text=text) for path, text in settings.items()]
    _train_in(world, Path(run), resolve_settings(file=Path(file), flags=flags).settings)


def train_all(
    world: World, folder: str, runs: Mapping[str, Mapping[str, str]]
) -> dict[str, list[float]]:
    """Train each of the runs, in the folder; return the losses of each one's steps."""
    os.chdir(folder)
    return {name: _train(world, Path(name), settings) for name, settings in runs.items()}


def _train(world: World, folder: Path, settings: Mapping[str, str]) -> list[float]:
    flags = [Flag(flag="--set", path=path, text=text) for path, text in settings.items()]
    _train_in(world, folder, resolve_settings(flags=flags).settings)
    dist.barrier()  # rank 0 writes the file that all read
    lines = (folder / "metrics" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _train_in(world: World, folder: Path, settings: Settings) -> None:
    # The same checks of the weights as in a fresh process, without the time that its imports take.
    with mock.patch.object(
        training,
        "run_exporter",
        lambda request, limit_s: exported.check(Path(request.folder), request),
    ):
        training.train_from_settings(settings, world, folder)
