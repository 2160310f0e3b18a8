"""The command of a rank that trains from a settings file, for commands that run trainings of their own."""

import argparse
import os
from pathlib import Path
from typing import Literal

from torchmuster.cli.config import settings_from
from torchmuster.config.here import check_here
from torchmuster.config.training import check_trainable, paths_for_ranks, with_absolute_folder
from torchmuster.config.written import settings_arguments
from torchmuster.devices import snapshot
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible

_WORKER = "torchmuster.worker"


def settings_file(options: argparse.Namespace) -> Path | None:
    """Return the settings file, given with or without its flag; None for a script."""
    words = options.stray
    if len(words) == 1 and words[0].endswith((".yaml", ".yml")) and options.config is None:
        options.stray, options.config = [], Path(words[0])
    if options.config is not None and options.command:
        raise Impossible(
            "a settings file and a script were both given",
            why="a settings file is for muster train's own training loop; a script has its own settings",
            fix="give one of the two",
        )
    config: Path | None = options.config
    return config


def training_command(
    options: argparse.Namespace, config: Path, device: str, *, steps: int, doing: str
) -> tuple[str, ...]:
    """Return the command of a rank, after checking that the training has enough steps for ``doing``."""
    resolved = with_absolute_folder(settings_from(options))
    check_trainable(resolved, file=str(config))
    check_here(resolved)
    given = resolved.settings.train.steps
    if given is not None and given < steps:
        raise Impossible(
            f"{doing} step {steps} was requested, but the training has {given} steps",
            why=f"train.steps is {given} ({resolved.sources['train.steps'].where})",
            fix=f"--set train.steps={steps}",
        )
    # Nothing is sent to trackers.
    needed = [path for path in paths_for_ranks() if not path.startswith("metrics.")]
    words = (_WORKER, *settings_arguments(resolved, needed))
    return (*words, "--device", "cpu") if device == "cpu" else words


def device_of_ranks(options: argparse.Namespace) -> tuple[Literal["cpu", "gpu"], int]:
    """Return the device type of the ranks, and the number of visible GPUs."""
    if options.device == "cpu":
        return "cpu", 0
    seen = len(visible(snapshot.take_snapshot().accelerators, os.environ).devices)
    if seen or options.device == "gpu":
        return "gpu", seen
    return "cpu", 0
