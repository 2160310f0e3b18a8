"""The command of a rank, for commands that run trainings of their own: a script, or a settings file of ``muster train``."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmuster.cli.options import ScriptOptions, flag
from torchmuster.cli.scripts import script_of
from torchmuster.cli.setting_options import SettingOptions, settings_of
from torchmuster.config.here import check_here
from torchmuster.config.training import check_trainable, paths_for_ranks, with_absolute_folder
from torchmuster.config.written import settings_arguments
from torchmuster.devices import snapshot
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible

WORKER = "torchmuster.worker"


@dataclass(frozen=True, kw_only=True)
class TrainedOptions(SettingOptions, ScriptOptions):
    """A script or a settings file, and the device that its ranks use."""

    device: Literal["cpu", "gpu"] | None = flag(
        "device of the ranks (default: GPUs if there are any, else the CPU)",
        choices=("cpu", "gpu"),
    )


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """What each rank runs; ``is_worker`` if it is the training loop of ``muster train``."""

    command: tuple[str, ...]
    module: bool
    is_worker: bool = False


def rank_command(options: TrainedOptions, device: str, *, steps: int, purpose: str) -> RankCommand:
    """Return the command of a rank, after checking that the script or the settings file is usable.

    A training must have ``steps`` steps for its ``purpose``.
    """
    config = options.config
    script = options.script
    if script and script[0].endswith((".yaml", ".yml")) and config is None:
        config, script = Path(script[0]), script[1:]
    if config is None:
        checked = script_of(script, Path.cwd())
        return RankCommand(command=checked.command, module=checked.module)
    if script:
        raise Impossible(
            f"{script[0]} is beside the settings file {config}",
            why="a settings file is for muster train's own training loop; a script has its own settings",
            fix="give one of the two; flags of muster come before either",
        )
    options = dataclasses.replace(options, config=config)
    resolved = with_absolute_folder(settings_of(options))
    check_trainable(resolved, file=str(config))
    check_here(resolved)
    given = resolved.settings.train.steps
    if given is not None and given < steps:
        raise Impossible(
            f"{purpose} step {steps} was requested, but the training has {given} steps",
            why=f"train.steps is {given} ({resolved.sources['train.steps'].where})",
            fix=f"--set train.steps={steps}",
        )
    # Nothing is sent to trackers.
    paths = [path for path in paths_for_ranks() if not path.startswith("metrics.")]
    command = (WORKER, *settings_arguments(resolved, paths))
    if device == "cpu":
        command = (*command, "--device", "cpu")
    return RankCommand(command=command, module=True, is_worker=True)


def device_of_ranks(options: TrainedOptions) -> tuple[Literal["cpu", "gpu"], int]:
    """Return the device type of the ranks, and the number of visible GPUs."""
    if options.device == "cpu":
        return "cpu", 0
    gpus = len(visible(snapshot.take_snapshot().accelerators, os.environ).devices)
    if gpus or options.device == "gpu":
        return "gpu", gpus
    return "cpu", 0
